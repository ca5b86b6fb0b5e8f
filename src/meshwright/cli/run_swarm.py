"""Runs of a swarm of peers: ``meshwright run --plan "... passes=swarm"``."""

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
WITHOUT = ("elastic", "link", "trace", "routing", "variances", "lengths", "job_trace")


def of_peers(plan: Plan) -> bool:
    """Whether a plan's stages are pools of peers."""
    return not plan.several and plan.passes.swarm is not None


def wrong_peers(given: Any) -> list[Diagnostic]:
    """List what a run of peers cannot be told."""
    from meshwright.errors import MeshwrightError
    from meshwright.world.trace import read

    why = "of ranks that are fixed: leave it out, or say passes=fixed"
    out = [bad(f"--{word.replace('_', '-')} with passes=swarm", why) for word in WITHOUT if getattr(given, word)]
    if launched():
        out.append(bad("passes=swarm under a launcher", "meshwright starts the peers: run it without a launcher"))
    if given.device == "cuda":
        out.append(bad("passes=swarm --device cuda", "processes with GPUs cannot be forked: --device cpu"))
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
    return out


def swarmed(given: Any, job: Job, predicted: Callable[[Any], Prediction], write: Callable[..., None]) -> int:
    """The run of a plan whose stages are pools of peers, in the world that is said."""
    from meshwright.answer.swarm import world_of
    from meshwright.run.swarm.train import train
    from meshwright.world.trace import JobWorld, read

    said = read(given.world) if given.world else JobWorld()
    found = world_of(said, job.plan.num_ranks)
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
