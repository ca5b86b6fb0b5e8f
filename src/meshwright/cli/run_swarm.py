"""Runs that ask peers: ``meshwright run --plan "... passes=swarm"``, or ``passes=dmoe:peers=4``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import console, print_json
from meshwright.cli.run_worlds import bad, measured
from meshwright.errors import Diagnostic
from meshwright.run.environment import launched

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction
    from meshwright.plan import Plan
    from meshwright.run.job import Job

#: Options that runs of peers do without.
WITHOUT = ("elastic", "link", "trace", "routing", "variances", "lengths", "job_trace", "data_workers", "prefetch")


def wrong_peers(given: Any, plan: Plan) -> list[Diagnostic]:
    """List what a run of a plan that asks peers cannot be told."""
    from meshwright.errors import MeshwrightError
    from meshwright.world.trace import read

    name = plan.passes.policy.partition(":")[0]
    why = "of ranks that are fixed: leave it out, or say passes=fixed"
    out = [bad(f"--{word.replace('_', '-')} with passes={name}", why) for word in WITHOUT if getattr(given, word)]
    if launched():
        out.append(bad(f"passes={name} under a launcher", "meshwright starts the peers: run it without a launcher"))
    if given.device == "cuda":
        out.append(bad(f"passes={name} --device cuda", "processes with GPUs cannot be forked: --device cpu"))
    if not given.world:
        return out
    place = f"--world {given.world}"
    try:
        world = read(given.world)
    except MeshwrightError as error:
        return [*out, *error.diagnostics]
    if (world.recovery, world.saving) != ("checkpoint", "blocking"):
        out.append(bad(place, "recovery= and saving= are of a prediction; peers that are left go on"))
    if world.clients is not None:
        out.append(bad(place, "clients differ, and peers are none: say slow= and ranks= of peers"))
    if world.mtbf_s is not None:
        out.append(bad(place, "a run is killed at the times of a trace, not of a mean: failures.csv for mtbf="))
    if plan.passes.peers and world.slow is not None and world.slow.computing(1 + plan.passes.peers)[0] != 1:
        out.append(bad(place, "rank 0 trains, and a run slows peers alone: say slow= of ranks from 1 on"))
    return out


def swarmed(given: Any, job: Job, predicted: Callable[[Any], Prediction], write: Callable[..., None]) -> int:
    """The run of a plan whose stages, or whose experts, peers have, in the world that is said."""
    from meshwright.answer.swarm import world_of
    from meshwright.run.dmoe import train as dmoe
    from meshwright.run.swarm import train as swarm
    from meshwright.world.trace import JobWorld, read

    said = read(given.world) if given.world else JobWorld()
    found = world_of(said, job.plan)
    train = dmoe.train if job.plan.passes.peers else swarm.train
    summary = train(job, found._replace(failures=said.trace or ()))
    for word in ("batches", "lengths"):
        summary.pop(word)
    prediction, comparison = predicted(None), None
    timeline = measured(summary, prediction)
    if summary["step_s"]:
        from meshwright.compare import compare

        comparison = compare(prediction, timeline)
    if given.json:
        from meshwright.report.run_text import to_json

        print_json(to_json(prediction, summary, comparison))
    else:
        from meshwright.report.run_text import render, render_swarm

        render(prediction, summary, comparison, console())
        render_swarm(summary["swarm"], console())
    write(given, summary, timeline)
    return 0
