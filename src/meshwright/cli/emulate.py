"""``meshwright emulate``: run a plan on emulated hosts, compute slept and communication real, beside its prediction."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import WANTED, asked, read_parts
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.run.emulate.measure import Emulated

DESCRIPTION = """Run a plan's training step on an emulated cluster, and lay the measured step beside the predicted one.

Every rank is a process on a host of its own: a network namespace, whose link to the others has the rate of --link.
Compute is slept for as long as the device of --on would take, times --scale; messages and collectives are real (gloo).
No GPU, no privileges and nobody else's network are needed; at most 32 ranks.

Exit code 0: it ran; 2: the question is wrong, or this machine cannot emulate."""
RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)bit", re.IGNORECASE)
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
#: What a link can be: slower ones take minutes a step, faster ones are faster than this machine moves bytes.
RATES_BITS_S = (1e6, 1e10)
DEFAULT_LINK, DEFAULT_REPEATS = "200mbit", 5
FORMAT_VERSION = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright emulate``."""

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or a question.toml that says all.") = ""
    on: options.text("CLUSTER", "How many of which device: 4xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp2 dp2 zero1', or a .toml file: meshwright explain plan.") = ""
    link: options.text("RATE", f"Of every host's link, each way, such as 1gbit; {DEFAULT_LINK} if left out.") = ""
    per_host: options.text("COUNT", "Ranks on one host; 1 if left out.") = ""
    repeats: options.text("COUNT", f"Measured steps, after one that warms up; {DEFAULT_REPEATS} if left out.") = ""
    scale: options.text(
        "FACTOR", "How many times slower than its device a rank computes; so that a step computes 0.6 s if left out."
    ) = ""
    trace: options.text("FILE", "Write the measured timeline of every step and rank, step.json.gz.") = ""
    predicted: options.text("FILE", "Write the predicted timeline too, for meshwright compare.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the plan was run."""
    given, wrong = options.read(Options, argv, command="emulate", description=DESCRIPTION)
    question = asked({field: getattr(given, field) for field in WANTED})
    wrong += options.missing(msgspec.structs.asdict(question), WANTED, command="emulate")
    rate = _rate(given.link or DEFAULT_LINK, wrong)
    repeats = _number(given.repeats or str(DEFAULT_REPEATS), "--repeats", 1, 1000, wrong, whole=True)
    per_host = _number(given.per_host or "1", "--per-host", 1, 32, wrong, whole=True)
    scale = _number(given.scale, "--scale", 1e-9, 1e12, wrong) if given.scale else None
    wrong += (
        unwritable(given.trace, "--trace") + unwritable(given.predicted, "--predicted") + lacking("emulate", "torch")
    )
    parts, found = read_parts(question)
    if wrong or found:
        raise MeshwrightError([*wrong, *found])
    from meshwright.run.emulate.measure import emulate

    model, cluster, train, plan = parts
    plan = plan.on(cluster.num_devices)
    what = f"emulating {plan.layout.num_ranks} ranks, {int(per_host)} a host, links of {rate / 1e6:g} Mbit/s"
    done = emulate(
        model, cluster, train, plan,
        rate_bits_s=rate, repeats=int(repeats), scale=scale, ranks_per_host=int(per_host), begun=lambda: note(what),
    )  # fmt: skip
    if given.json:
        print_json(_as_json(done))
    else:
        _render(done, console())
    for file, timeline in ((given.trace, done.timeline), (given.predicted, done.prediction.timeline)):
        if file:
            from meshwright.trace.chrome import write

            write(timeline, file)
            note(f"wrote {file}")
    return 0


def _rate(text: str, wrong: list[Diagnostic]) -> float:
    match = RATE.fullmatch(text.strip())
    rate = float(match[1]) * UNITS[match[2].lower()] if match else 0.0
    low, high = RATES_BITS_S
    if not low <= rate <= high:
        wrong.append(_bad(f"--link {text}", "it is a rate from 1mbit to 10gbit"))
    return rate


def _number(text: str, option: str, low: float, high: float, wrong: list[Diagnostic], *, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        wrong.append(_bad(f"{option} {text}", f"it is a {'whole ' * whole}number from {low:g} to {high:g}"))
    return value


def _bad(place: str, help: str) -> Diagnostic:
    return Diagnostic(code="U004", message=f"{place} cannot be", place="meshwright emulate", help=help)


def _as_json(done: Emulated) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "plan": done.prediction.plan.text(),
        "cluster": done.cluster.name,
        "scale": done.scale,
        "links": msgspec.to_builtins(done.links),
        "predicted_s": done.prediction.step_time_s,
        "predicted_apart_s": done.apart_s,
        "measured_s": done.step_time_s,
        "measured_spread_s": done.spread_s,
        "steps_s": done.steps_s,
        "error": done.error,
        "error_apart": done.apart_error,
        "sleep_late_s": done.late_s,
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
    out.print(f"  compute    {done.scale:,.3g} times slower than the device")
    out.print(f"  predicted  {done.prediction.step_time_s * 1e3:,.1f} ms ({done.error:+.1%})")
    out.print(
        f"             {done.apart_s * 1e3:,.1f} ms ({done.apart_error:+.1%}) if exchanges on a port passed each other"
    )
    out.print(
        f"  measured   {done.step_time_s * 1e3:,.1f} ms, median of {len(done.steps_s)} "
        f"({low * 1e3:,.1f} to {high * 1e3:,.1f})"
    )
    out.print(f"  sleeps     end at most {done.late_s * 1e3:.2f} ms late (19 of 20), {done.disturbed} disturbed steps")
