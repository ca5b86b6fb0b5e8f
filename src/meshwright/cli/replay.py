"""``meshwright replay``: what a measured step would take if something were different."""

from __future__ import annotations

import re

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Predict a measured step with a change: faster links or kernels, another schedule, other buckets.

The trace's task graph is rebuilt and timed as it was first, and how far that is from what was measured is printed:
within 5% the what-ifs can be trusted.

Exit code 0; 2: the trace cannot answer the question."""
COMMAND = "replay"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kb|mb|gb|kib|mib|gib)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright replay``."""

    timeline: options.positional("TRACE", "A trace file of run, emulate or predict.") = ""
    link_scale: options.text("X", "Links X times as fast: 0.5 doubles every transfer.") = ""
    set: options.repeated("NAME=X", "Tasks of this kind or queue take X times as long: F=0.9, pp_forward=2.") = ()
    schedule: options.text("NAME", "Another pipeline schedule (meshwright catalog schedules).") = ""
    vpp: options.text("N", "Stages on each rank under that schedule.") = ""
    weight_share: options.text(
        "X", "Share of a backward that weight gradients take, for traces that do not split it."
    ) = ""
    bucket: options.text("SIZE", "Exchange gradients in buckets of this size: 25mb.") = ""
    trace: options.text("FILE", "Write the timeline as it would be.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 once the trace answered."""
    given, wrong = options.read(ReplayOptions, argv, command=COMMAND, description=DESCRIPTION)
    wrong += options.missing({"timeline": given.timeline}, {"timeline": "TRACE, a trace file"}, command=COMMAND)
    wrong += unwritable(given.trace, "--trace")
    asked = _asked(given, wrong)
    from meshwright.cli.compare import timelines

    (measured,) = timelines([given.timeline], wrong)
    from meshwright.replay.answer import Asked, replay

    answer = replay(measured, Asked(**asked))
    if given.json:
        print_json(answer.to_json())
    else:
        from meshwright.report.replay_text import render

        render(answer, console())
    if given.trace:
        from meshwright.trace import write

        write(answer.timeline, given.trace)
        note(f"wrote {given.trace}")
    return 0


def _asked(given: ReplayOptions, wrong: list[Diagnostic]) -> dict[str, object]:
    """The options as numbers; X106 for each that is none."""
    factors: dict[str, float] = {}
    if given.link_scale:
        speed = _number("--link-scale", given.link_scale, wrong)
        factors["link"] = 1.0 / speed
    for word in given.set:
        name, _, value = word.partition("=")
        factors[name] = factors.get(name, 1.0) * _number(f"--set {name}", value, wrong)
    if factors:
        from meshwright.replay.whatif import check

        try:
            check(factors)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return {
        "factors": factors,
        "schedule": given.schedule,
        "vpp": int(_number("--vpp", given.vpp, wrong)) if given.vpp else None,
        "weight_share": _number("--weight-share", given.weight_share, wrong, below=1.0) if given.weight_share else None,
        "bucket_bytes": _size(given.bucket, wrong) if given.bucket else 0,
    }


def _number(option: str, text: str, wrong: list[Diagnostic], below: float = float("inf")) -> float:
    """A number above 0 and below `below`, 1 where it is none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        message, help = f"{option} is {text!r}, not a number", f"a number above 0{limit}: {option} 0.5"
        wrong.append(Diagnostic(code="X106", message=message, place=f"meshwright {COMMAND}", help=help))
        return 0.5
    return value


def _size(text: str, wrong: list[Diagnostic]) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found.group(1)) * _UNITS[(found.group(2) or "").lower()]) if found else 0
    if size < 1:
        message = f"--bucket is {text!r}, not a size"
        wrong.append(Diagnostic(code="X106", message=message, place=f"meshwright {COMMAND}", help="such as 25mb"))
    return size
