"""``meshwright reproduce``: one paper's figures beside ours."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import MeshwrightError

DESCRIPTION = """Run the check of one published system: the paper's figures beside ours, with the error, what they are
against, and what is assumed.

Exit code 0: its figures are met; 1: something is off or missing, which is said; 2: no such paper."""
FORMAT_VERSION = 2


class ReproduceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright reproduce``."""

    paper: options.positional("ID", "A paper's id: meshwright papers lists them.") = ""
    report: options.text("FILE", "Write it as one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the row's figures are met, 1 when something is off or missing."""
    given, wrong = options.read(ReproduceOptions, argv, command="reproduce", description=DESCRIPTION)
    wrong += options.missing({"paper": given.paper}, {"paper": "ID, such as zero-bubble"}, command="reproduce")
    wrong += unwritable(given.report, "--report")
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.papers import checking, state
    from meshwright.papers.record import paper as find

    paper = find(given.paper)
    outcome = checking.run(paper)
    reached = state.of(paper, outcome)
    if given.json:
        print_json(
            {
                "format_version": FORMAT_VERSION,
                "paper": msgspec.to_builtins(paper),
                "state": reached.state,
                "why": reached.why,
                "outcome": None if outcome is None else _plain(outcome),
            }
        )
    else:
        from meshwright.report.papers_text import reproduced

        reproduced(paper, outcome, reached, console())
    if given.report:
        from meshwright.report.papers_html import write_reproduced

        write_reproduced(paper, outcome, reached, given.report)
        note(f"wrote {given.report}")
    return 0 if reached.state in state.REPRODUCED else 1


def _plain(outcome) -> dict:
    figures = [{**msgspec.to_builtins(f), "error": f.error, "ok": f.ok} for f in outcome.figures]
    return {**msgspec.to_builtins(outcome), "figures": figures}
