"""``meshwright diagnose``: which rank or link of a traced job is slow, or hangs."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Say which rank or link of a job is slow, or hangs, from a trace of its steps.

The same work on other ranks says how long it should take. A rank whose own work takes longer is slow; of slow messages
and collectives the rank or the pair of ranks is named that explains most of them. What the step would take without
stragglers, and with each rank's alone, is the traced graph timed again.

Exit code 0: nothing is slow; 1: something is; 2: the trace cannot say."""
COMMAND = "diagnose"


class DiagnoseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright diagnose``."""

    timeline: options.positional("TRACE", "A trace file of run, emulate, or of predict with --world slow=...") = ""
    above: options.text(
        "SHARE", "How much longer than its like something takes to be called slow; 0.1 if left out."
    ) = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 where nothing is slow, 1 where something is."""
    given, wrong = options.read(DiagnoseOptions, argv, command=COMMAND, description=DESCRIPTION)
    wrong += options.missing({"timeline": given.timeline}, {"timeline": "TRACE, a trace file"}, command=COMMAND)
    above = _share(given.above, wrong)
    from meshwright.cli.compare import timelines

    (traced,) = timelines([given.timeline], wrong)
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.replay.diagnose import diagnose

    found = diagnose(traced, above=above)
    if given.json:
        from meshwright.report.diagnose_text import to_json

        print_json(to_json(found))
    else:
        from meshwright.report.diagnose_text import render

        render(found, console())
    return 1 if found.suspects else 0


def _share(text: str, wrong: list[Diagnostic]) -> float:
    """A share above 0, 0.1 where none is said."""
    try:
        value = float(text or 0.1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 100:
        message = f"--above is {text!r}, not a share"
        wrong.append(
            Diagnostic(code="X106", message=message, place=f"meshwright {COMMAND}", help="such as 0.1 for a tenth")
        )
        return 0.1
    return value
