"""``meshwright emulate``: run a plan on emulated hosts, compute slept and communication real, beside its prediction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import WANTED, WORLD, asked, read_parts, read_world
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import seconds

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.plan import Plan
    from meshwright.run.emulate.measure import Emulated
    from meshwright.run.emulate.wire import EmulatedWire
    from meshwright.timeline import Timeline
    from meshwright.world.trace import JobWorld

DESCRIPTION = """Run a plan's training step on an emulated cluster, and lay the measured step beside the predicted one.

Every rank is a process on a host of its own: a network namespace, whose link to the others has the rate and the delay
of --link. Compute is slept for as long as the device of --on would take, times --scale; messages and collectives are
real (gloo). No GPU, no privileges and nobody else's network are needed; at most 32 ranks.

Of a plan with sync= the executor itself runs on the hosts, and only its passes are slept: tensors, codes, rounds and
updates are real, and a repeat is a round.

With --world the whole run of --tokens is lived through instead, made small: --steps steps stand for all of them, and
days between failures, checkpoints, restarts and repairs are seconds by the same factor, which is printed. Ranks are
killed when nodes fail, what is done about it is decided as in meshwright predict --world, and the job is laid beside
its simulation event by event.

Exit code 0: it ran; 2: the question is wrong, or this machine cannot emulate."""
DEFAULT_LINK, DEFAULT_REPEATS, DEFAULT_STEPS = "200mbit", 5, 40
MOST_STEPS = 10_000
#: What keeps the rate and the delay of links, in words.
SHAPED = {
    "tbf": "token buckets of the kernel",
    "tbf and netem": "token buckets and netem of the kernel",
    "tbf and switch": "token buckets of the kernel; delay by a forwarding process, as this kernel has no netem",
}
WORLD_WANTED = {"world": "--world, which says what the run meets"}
FORMAT_VERSION = 1
#: Seconds from which on an emulation is long, and what makes it shorter is said.
LONG_S = 600.0


class EmulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright emulate``."""

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or a question.toml that says all.") = ""
    on: options.text("CLUSTER", "How many of which device: 4xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp2 dp2 zero1', or a .toml file: meshwright explain plan.") = ""
    link: options.text(
        "RATE[,delay=TIME]", f"Of every host, each way: 1gbit or 100mbit,delay=20ms; {DEFAULT_LINK} if left out."
    ) = ""
    per_host: options.text("COUNT", "Ranks on one host; 1 if left out.") = ""
    repeats: options.text("COUNT", f"Measured steps, after one that warms up; {DEFAULT_REPEATS} if left out.") = ""
    scale: options.text(
        "FACTOR", "How many times slower than its device a rank computes; so that a step computes 0.6 s if left out."
    ) = ""
    tokens: options.TOKENS = ""
    world: options.text(
        "WORLD", "What the whole run meets: mtbf=3h,spares=1,restart=1h or failures.csv: meshwright explain world."
    ) = ""
    steps: options.text("COUNT", f"Emulated steps that stand for the whole run's; {DEFAULT_STEPS} if left out.") = ""
    job_trace: options.text("FILE", "Write what the run met in --world, event by event, job.json.") = ""
    trace: options.text("FILE", "Write the measured timeline of every step and rank, step.json.gz.") = ""
    predicted: options.text("FILE", "Write the predicted timeline too, for meshwright compare.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the plan was run."""
    given, wrong = options.read(EmulateOptions, argv, command="emulate", description=DESCRIPTION)
    question = asked({field: getattr(given, field) for field in (*WANTED, "tokens", *WORLD)})
    of_job, slow = _of_job(given)
    wrong += options.missing(
        msgspec.structs.asdict(question), WANTED | (WORLD_WANTED if of_job else {}), command="emulate"
    )
    wrong += _contradictions(given, of_job)
    numbers, wire = _numbers(given, wrong), read_wire(given.link or DEFAULT_LINK, wrong)
    for option in ("trace", "predicted", "job_trace"):
        wrong += unwritable(getattr(given, option), f"--{option.replace('_', '-')}")
    wrong += lacking("emulate", "torch")
    parts, found = read_parts(question)
    world, unreadable = read_world(question, parts) if of_job else (None, [])
    if wrong or found or unreadable:
        raise MeshwrightError([*wrong, *found, *unreadable])
    plan = _in_step(parts[3].on(parts[1].num_devices), world)
    hosts = {"rate_bits_s": wire.rate_bits_s, "delay_s": wire.delay_s}
    hosts |= {"scale": numbers["scale"], "ranks_per_host": int(numbers["per_host"])}
    what = f"{plan.layout.num_ranks} ranks, {hosts['ranks_per_host']} a host, links of {wire}"
    hosts["begun"] = lambda: note(f"emulating {what}")
    hosts["expected"] = _expected
    if world is not None:
        return _job(given, (*parts[:3], plan), world, int(numbers["steps"]), hosts)
    if slow is not None:
        hosts["world"] = slow
    done = _emulated(parts[:3], plan, repeats=int(numbers["repeats"]), **hosts)
    if given.json:
        print_json(_as_json(done))
    else:
        _render(done, console())
    for file, timeline in ((given.trace, done.timeline), (given.predicted, done.prediction.timeline)):
        if file:
            _write(timeline, file)
    return 0


def _emulated(parts: tuple[Any, ...], plan: Plan, **hosts: Any) -> Emulated:
    """The steps of a script; of the executor where replicas exchange otherwise than all gradients in every step, or
    compute at paces that vary."""
    from meshwright.plan import Sync
    from meshwright.run.emulate import executed, measure

    world = hosts.get("world")
    if plan.sync != Sync() or (world is not None and world.jitter is not None):
        return executed.emulate(*parts, plan, **hosts)
    return measure.emulate(*parts, plan, slow=None if world is None else hosts.pop("world").slow, **hosts)


def _of_job(given: EmulateOptions) -> tuple[bool, JobWorld | None]:
    """Whether a whole run is asked for, and the world of slow and varying ranks of a step otherwise.

    Raises:
        MeshwrightError: U004 for slow links, which have the rate of --link.
    """
    from meshwright.world.trace import read

    if given.steps or given.job_trace or not given.world:
        return bool(given.world or given.steps or given.job_trace), None
    try:
        world = read(given.world)
    except MeshwrightError:
        return True, None  # told with all else that is wrong
    if world.of_job or (world.slow is None and world.jitter is None):
        return True, None
    if world.slow is not None and (world.slow.slowlink or world.slow.slownic):
        raise MeshwrightError([_bad(f"--world {given.world}", "links have the rate of --link: only ranks can be slow")])
    return False, world


def _in_step(plan: Plan, world: JobWorld | None) -> Plan:
    """The plan, whose replicas must have steps in common: clients of a server are not emulated."""
    from meshwright.run.exchanges import in_step

    if world is not None and world.clients is not None:
        message = "the world says how clients differ, and clients of a server are not emulated"
        raise MeshwrightError.one("O005", message, place="--world", help="meshwright run trains them in that world")
    if not plan.several and plan.trainers < plan.layout.dp:
        message = (
            f"{plan.layout.dp - plan.trainers} replicas only sum under sync={plan.sync.policy}, and are not emulated"
        )
        raise MeshwrightError.one("L005", message, place="plan.sync.policy", help="meshwright run, or drop aux=")
    return in_step(plan)


def _expected(expected_s: float) -> None:
    """Say how long it should take, and what makes it shorter where that is long."""
    note(f"predicted to take {seconds(expected_s)}, once links are measured")
    if expected_s > LONG_S:
        note("a model of fewer layers, a faster --link or a smaller --scale takes less; Ctrl-C ends it")


def _job(given: EmulateOptions, parts: tuple[Any, ...], world: JobWorld, num_steps: int, hosts: dict[str, Any]) -> int:
    """Live through a whole run in its world."""
    from meshwright.run.emulate.days import emulate_job

    done = emulate_job(*parts, world, num_steps=num_steps, **hosts)
    if given.json:
        from meshwright.report.emulated_job import to_json

        print_json(to_json(done))
    else:
        from meshwright.report.emulated_job import render

        render(done, console())
    if given.job_trace:
        from meshwright.world.history import history

        identity = msgspec.structs.replace(done.prediction.identity, source="measured")
        _write(history(done.lived.run.log, identity), given.job_trace)
    return 0


def _write(timeline: Timeline, file: str) -> None:
    from meshwright.trace.chrome import write

    write(timeline, file)
    note(f"wrote {file}")


def _numbers(given: EmulateOptions, wrong: list[Diagnostic]) -> dict[str, float | None]:
    """The numbers among the options; those that cannot be are added to `wrong`."""
    return {
        "repeats": _number(given.repeats or str(DEFAULT_REPEATS), "--repeats", 1, 1000, wrong, whole=True),
        "per_host": _number(given.per_host or "1", "--per-host", 1, 32, wrong, whole=True),
        "steps": _number(given.steps or str(DEFAULT_STEPS), "--steps", 1, MOST_STEPS, wrong, whole=True),
        "scale": _number(given.scale, "--scale", 1e-9, 1e12, wrong) if given.scale else None,
    }


def _contradictions(given: EmulateOptions, of_job: bool) -> list[Diagnostic]:
    """U004 for every option of a single step beside those of a whole run."""
    if not of_job:
        return []
    of_step = (name for name in ("repeats", "trace", "predicted") if getattr(given, name))
    help = "it is of one measured step, and --world of a whole run: leave out one of them"
    return [_bad(f"--{name} {getattr(given, name)}", help) for name in of_step]


def read_wire(text: str, wrong: list[Diagnostic], command: str = "emulate") -> EmulatedWire | None:
    """The links that ``--link`` says; one that is not emulated is added to `wrong`."""
    from meshwright.run.emulate.wire import WANTED as LINKS
    from meshwright.run.emulate.wire import read

    found = read(text)
    if found is None:
        wrong.append(_bad(f"--link {text}", f"it is {LINKS}", command))
    return found


def _number(text: str, option: str, low: float, high: float, wrong: list[Diagnostic], *, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        wrong.append(_bad(f"{option} {text}", f"it is a {'whole ' * whole}number from {low:g} to {high:g}"))
    return value


def _bad(place: str, help: str, command: str = "emulate") -> Diagnostic:
    return Diagnostic(code="U004", message=f"{place} cannot be", place=f"meshwright {command}", help=help)


def _as_json(done: Emulated) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "plan": done.prediction.plan.text(),
        "cluster": done.cluster.name,
        "scale": done.scale,
        "links": msgspec.to_builtins(done.links),
        "predicted_s": done.prediction.step_time_s,
        "predicted_apart_s": done.apart_s,
        "predicted_same_steps_s": done.same_steps_s,
        "measured_s": done.step_time_s,
        "measured_spread_s": done.spread_s,
        "steps_s": done.steps_s,
        "error": done.error,
        "error_apart": done.apart_error,
        "sleep_late_s": done.late_s,
        "shaped_by": done.shaped_by,
        "sent_bytes": done.sent_bytes or None,
        "computed_beside_passes_s": done.outside_s or None,
        "disturbed_steps": done.disturbed,
        "identity": done.prediction.identity.said(),
    }


def _render(done: Emulated, out: Console) -> None:
    low, high = done.spread_s
    link = done.links.link
    out.print(
        f"[bold]{done.prediction.model.name}[/] under [bold]{done.prediction.plan.text()}[/] on {done.cluster.name}"
    )
    out.print(
        f"  link       {link.bytes_s * 8 / 1e6:,.1f} Mbit/s of payload and {link.latency_s * 1e6:,.0f} us a message"
    )
    out.print(f"             kept by {SHAPED[done.shaped_by]}")
    out.print(f"  compute    {done.scale:,.3g} times slower than the device")
    if done.same_steps_s is None:
        out.print(f"  predicted  {done.prediction.step_time_s * 1e3:,.1f} ms ({done.error:+.1%})")
    else:
        out.print(f"  predicted  {done.prediction.step_time_s * 1e3:,.1f} ms in the mean over many steps")
        out.print(f"             {done.same_steps_s * 1e3:,.1f} ms ({done.error:+.1%}) at the paces of those measured")
    if not done.executed:
        out.print(
            f"             {done.apart_s * 1e3:,.1f} ms ({done.apart_error:+.1%}) if exchanges on a port passed each "
            "other"
        )
    what = "rounds' means of a step" if done.prediction.round is not None else "steps"
    out.print(
        f"  measured   {done.step_time_s * 1e3:,.1f} ms, {'median' if done.same_steps_s is None else 'mean'} of "
        f"{len(done.steps_s)} {what} "
        f"({low * 1e3:,.1f} to {high * 1e3:,.1f})"
    )
    if done.executed:
        out.print(f"  sent       {done.sent_bytes / 1e6:,.3f} MB a step and rank, headers included")
        out.print(
            f"  beside     {done.outside_s * 1e3:,.1f} ms a step that ranks compute for real: codes, updates, copies"
        )
        return
    out.print(f"  sleeps     end at most {done.late_s * 1e3:.2f} ms late (19 of 20), {done.disturbed} disturbed steps")
