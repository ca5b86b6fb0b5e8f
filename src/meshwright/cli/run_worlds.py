"""Runs that meet failures: ``meshwright run --world`` and ``--elastic``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import console, note, print_json
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.environment import launched

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction
    from meshwright.plan import Plan
    from meshwright.run.elastic.launcher import ElasticRun
    from meshwright.run.job import Job
    from meshwright.world.faulty import FaultyWorkers


def bad(place: str, help: str) -> Diagnostic:
    """L005: options of a run that do not go together."""
    return Diagnostic(code="L005", message=f"{place} cannot be", place="meshwright run", help=help)


def wrong_world(given: Any) -> list[Diagnostic]:
    """List the errors in the failures that a run is to meet (``--world``, ``--elastic``), and in the options that these
    need."""
    from meshwright.world.trace import read

    if not given.world and not given.elastic:
        help = "it is of a run that meets failures: --world failures.csv, or --elastic"
        return [bad("--job-trace", help)] if given.job_trace else []
    out = _wrong_elastic(given) if given.elastic else []
    if not given.world:
        return out
    place = f"--world {given.world}"
    try:
        world = read(given.world)
    except MeshwrightError as error:
        return [*out, *error.diagnostics]
    if (world.recovery, world.saving) != ("checkpoint", "blocking"):
        out.append(bad(place, "recovery= and saving= are of a prediction; a run is --elastic, or goes on from --out"))
    if world.slow is not None:
        out.append(bad(place, "slow ranks are of a prediction: a run cannot be slowed"))
    if world.faulty is not None and (world.of_job or given.elastic or world.clients is not None or launched()):
        out.append(bad(place, "faulty workers stand alone: keep faulty= and seed=, and start it without a launcher"))
    if world.faulty is not None:
        return out
    if world.clients is not None:
        differ = world.of_job or given.elastic
        return [*out, bad(place, "clients differ, and nodes do not fail: keep the words of one")] if differ else out
    if world.trace is None and not given.elastic:
        out.append(bad(place, "a run is killed at the times of a trace: --world failures.csv"))
    elif world.mtbf_s is not None:
        out.append(bad(place, "a run is killed at the times of a trace, not of a mean: failures.csv for mtbf="))
    elif world.trace is not None and any(change.slowdown is not None for change in world.trace):
        out.append(bad(place, "a run cannot be slowed: leave `slow` lines to meshwright predict --world"))
    if not given.elastic and not (given.out and given.save_every):
        out.append(bad(place, "a run that recovers needs checkpoints, or --elastic: --out FOLDER --save-every STEPS"))
    if launched() and not given.elastic:
        out.append(bad(place, "processes are killed where meshwright starts them: run it without a launcher"))
    return out


def no_clients(given: Any, plan: Plan) -> list[Diagnostic]:
    """List the words of a world that say how clients differ, where replicas of the plan are none."""
    from meshwright.sync.policy import read as policy
    from meshwright.world.trace import read

    if given.world and (faulty := read(given.world).faulty) is not None:
        return wrong_faulty(faulty, plan, f"--world {given.world}")
    if not given.world or read(given.world).clients is None:
        return []
    if not plan.several and policy(plan.sync.policy).rule.decider is not None:
        return []
    help = "clients differ, and replicas of this plan are none: say a sync of clients, such as sync=fedavg:h=8"
    return [bad(f"--world {given.world}", help)]


def wrong_faulty(faulty: FaultyWorkers, plan: Plan, place: str) -> list[Diagnostic]:
    """List why replicas of a plan cannot be faulty: they bring no gradients in every step, or none would be sound."""
    from meshwright.sync.fragments import GRADIENTS
    from meshwright.sync.policy import read as policy

    if plan.several:
        return [bad(place, "faulty workers are replicas of one pool")]
    said = policy(plan.sync.policy)
    if said.when > 1 or GRADIENTS not in said.fragments or said.rule.decider is not None or said.rule.forwards:
        help = f"replicas under sync={said.text} bring no gradients in every step: say sync=step:combine=median or flag"
        return [bad(place, help)]
    if faulty.count >= plan.layout.dp * plan.layout.cp:
        return [bad(place, f"the plan has {plan.layout.dp * plan.layout.cp} replicas, and some must be sound")]
    return []


def unknown(given: Any, job: Job) -> list[Diagnostic]:
    """List the nodes that a trace names and the job does not have: in a run every rank is one."""
    from meshwright.world.trace import read, unknown_nodes

    world = read(given.world) if given.world else None
    return [] if world is None or world.trace is None else unknown_nodes(world.trace, job.plan.num_ranks, given.world)


def _wrong_elastic(given: Any) -> list[Diagnostic]:
    out = []
    if launched():
        out.append(bad("--elastic", "meshwright starts the processes and starts them again: run it without a launcher"))
    if given.device == "cuda":
        out.append(bad("--elastic --device cuda", "processes with GPUs cannot be forked: --device cpu"))
    if given.link:
        out.append(bad("--elastic --link", "emulated hosts do not come back: keep one of them"))
    return out


def unelastic(job: Job) -> list[Diagnostic]:
    """List what keeps a job from being trained elastically: state that no single step's memory holds."""
    from meshwright.sync.policy import read
    from meshwright.sync.record import USUAL

    out = []
    if job.plan.several:
        return [bad("--elastic with a plan of several pools", "say a plan of one pool")]
    policy = read(job.plan.sync.policy)
    other = policy.rule.forwards or policy.rule.optimizer or policy.reference or policy.scaling or policy.own_data
    rounds = policy.when > 1 and policy.alike_every and not other
    if policy.text != read(USUAL).text and not rounds:
        help = f"replicas that hold the same at the ends of rounds: sync={USUAL}, sync=local:h=8 or sync=diloco:h=8"
        out.append(bad(f"--elastic with sync={policy.text}", help))
    if job.train.grow or job.train.align or job.train.clusters:
        what = "--elastic with a batch or rates that follow the gradient"
        out.append(bad(what, "leave grow, align and clusters out of --train"))
    return out


def recovered(given: Any, job: Job, predicted: Callable[[Any], Prediction], write: Callable[..., None]) -> int:
    """The run with processes killed as its world says; 1 where it was asked to end before its last step."""
    from meshwright.run.recover import recovered
    from meshwright.world.recovery import Recovery
    from meshwright.world.trace import read

    world = read(given.world)
    decider = Recovery(save_every=job.save_every, spares=world.spares)
    found = recovered(job, decider, world.trace, repair_s=world.repair_s, device=given.device or "auto")
    if found is None:
        note("ended on request: --resume goes on from its last checkpoint")
        return 1
    found.summary.pop("batches")
    prediction, comparison = predicted(found.summary.pop("lengths")), None
    timeline = measured(found.summary, prediction)
    if found.summary["step_s"]:
        from meshwright.compare import compare

        comparison = compare(prediction, timeline)
    if given.json:
        from meshwright.report.run_text import recovered_json

        print_json(recovered_json(prediction, found, comparison))
    else:
        from meshwright.report.run_text import render, render_recovered

        render(prediction, found.summary, comparison, console())
        render_recovered(found, console())
    write(given, found.summary, timeline)
    _job_trace(given, found.log, timeline.identity)
    return 0


def _job_trace(given: Any, log: Any, identity: Any) -> None:
    if given.job_trace:
        from meshwright.trace import write
        from meshwright.world.history import history

        write(history(log, identity), given.job_trace)
        note(f"wrote {given.job_trace}")


def measured(summary: dict[str, Any], prediction: Prediction) -> Any:
    """The timeline of a run, taken out of its summary; what was run is what is predicted, documents included."""
    from base64 import b64decode

    import msgspec

    from meshwright.timeline import unpack

    timeline = unpack(b64decode(summary.pop("timeline")))
    who = msgspec.structs.replace(prediction.identity, source="measured")
    records = timeline.records | _paced(prediction, str(summary["device"]))
    return msgspec.structs.replace(timeline, identity=who, records=records)


def _paced(prediction: Prediction, device: str) -> dict[str, Any]:
    """The pace of this machine after a run on `device`, where what was predicted is of its own profile."""
    kind = "cpu" if prediction.cluster.islands[0].device.cores else "cuda"
    if "pace" not in prediction.timeline.records or (kind == "cpu") != (device == "cpu"):
        return {}
    from meshwright.compare.pace import record
    from meshwright.run.bench.pace import now

    found = now(kind, prediction.num_devices)
    return {} if found is None else record(found)


def elastic(given: Any, job: Job, predicted: Callable[[Any], Prediction], write: Callable[..., None]) -> int:
    """The run that survives the death of any of its processes; 1 where it was asked to end before its last step."""
    from meshwright.answer.replan import replanned
    from meshwright.run.elastic import launcher
    from meshwright.sync.policy import read as read_policy
    from meshwright.world.elastic import Elastic
    from meshwright.world.trace import JobWorld, read

    world = read(given.world) if given.world else JobWorld()
    prediction = predicted(None)
    ranks = job.plan.num_ranks

    @cache
    def formed(devices: int) -> launcher.Formed | None:
        if devices == ranks:
            return launcher.Formed(job.plan, (), job.schedule_params)
        found = replanned(job.model, prediction.cluster, job.train, job.plan, devices)
        return None if found is None else launcher.Formed(found.plan, found.counts, found.params)

    sizes = {ranks}
    if world.spares is not None:  # else there is always one that takes the place of a lost one
        sizes |= {found.plan.num_ranks for n in range(1, ranks) if (found := formed(n)) is not None}
    every = read_policy(job.plan.sync.policy).alike_every
    decider = Elastic(sizes=tuple(sorted(sizes)), spares=world.spares, save_every=every)
    found = launcher.run(job, decider, formed, repair_s=world.repair_s, trace=world.trace or ())
    if found.summary["stopped"]:
        note(f"ended on request{': --resume goes on from its last checkpoint' if job.out else ''}")
        return 1
    found.summary.pop("batches")
    prediction = predicted(found.summary.pop("lengths"))
    timeline = measured(found.summary, prediction)
    _show(given, prediction, found)
    write(given, found.summary, timeline)
    _job_trace(given, found.log, prediction.identity)
    return 0


def _show(given: Any, prediction: Prediction, found: ElasticRun) -> None:
    if given.json:
        from meshwright.report.run_text import elastic_json

        print_json(elastic_json(prediction, found))
    else:
        from meshwright.report.run_text import render, render_elastic

        render(prediction, found.summary, None, console())
        render_elastic(found, console())
