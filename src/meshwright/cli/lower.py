"""``meshwright lower``: what a plan becomes, pass by pass."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json
from meshwright.cli.question import OPTIONAL, WANTED, asked, read_parts
from meshwright.errors import Diagnostic, MeshwrightError, nearest

DESCRIPTION = """Show the task graph of a plan after a pass of lowering, a line a task.

A line is a task: its number, kind, queue and rank, stage (s), chunk (c), microbatch (mb) and layer (l), its role or
program in brackets, and the tasks it waits for. Passes: place, assign, schedule, compute, messages, exchanges, tiers,
update, memory, bind.

Say MODEL, --on, --train and --plan, or name a question.toml that says them; options go over the file."""
FORMAT_VERSION = 1
#: The passes in their order, as :mod:`meshwright.lower.show` has them; help does not load that.
PASSES = (
    "place",
    "assign",
    "schedule",
    "public",
    "compute",
    "messages",
    "lessons",
    "exchanges",
    "tiers",
    "update",
    "memory",
    "bind",
)
#: Lines shown unless --lines says otherwise.
USUAL_LINES = 60


class LowerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright lower``."""

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or a question.toml.") = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1', or a .toml file: meshwright explain plan.") = ""
    show: options.text("PASS", "The last pass to run: place, assign, schedule, ..., bind (all).") = "bind"
    lines: options.text("N", "Lines shown at most, 0 for all (60).") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the graph is shown; an illegal plan is misuse."""
    given, wrong = options.read(LowerOptions, argv, command="lower", description=DESCRIPTION)
    question = asked({field: getattr(given, field, "") for field in (*WANTED, *OPTIONAL)})
    wrong += [] if wrong else _unknown(given)
    wrong += options.missing(msgspec.structs.asdict(question), WANTED, command="lower")
    parts, unread = read_parts(question)
    wrong += unread
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.lower.show import shown
    from meshwright.plan import check

    model, cluster, train, plan = parts
    plan = plan.on(cluster.num_devices)
    illegal = check(plan, model, cluster, train)
    if illegal:
        raise MeshwrightError(illegal)
    lines = shown(plan, model, cluster, train, given.show)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, "plan": plan.text(), "pass": given.show, "lines": lines})
        return 0
    most = int(given.lines) if given.lines else USUAL_LINES
    out = console()
    for line in lines[:most] if most else lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if most and len(lines) > most:
        note(f"{len(lines) - most:,} lines more: --lines 0 shows all")
    return 0


def _unknown(given: LowerOptions) -> list[Diagnostic]:
    """Return a diagnostic for each option of this command alone that has an unknown value."""
    wrong = []
    if given.show not in PASSES:
        help = nearest(given.show, list(PASSES))
        wrong.append(Diagnostic(code="X022", message=f"no pass {given.show!r}", place="--show", help=help))
    if given.lines and not given.lines.isdecimal():
        message = f"lines={given.lines!r} is no whole number of 0 and more"
        wrong.append(
            Diagnostic(code="X023", message=message, place="--lines", help="such as --lines 200, or 0 for all")
        )
    return wrong
