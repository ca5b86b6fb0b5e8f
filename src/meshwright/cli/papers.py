"""``meshwright papers``: every published system that is known, and whether its figures are reproduced."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError, nearest

DESCRIPTION = """Published systems: what each does, and whether its figures are reproduced here.

A row works when its check reproduces the paper, partly when something is missing, which is said, and else not yet.
States come from running the checks, and are kept until the code changes; those that may be of the moment, as when a
process died or the machine was busy, are found anew."""
FORMAT_VERSION = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright papers`` takes."""

    area: options.text("AREA", "Only this area, such as pipeline.") = ""
    state: options.text("STATE", "Only works, partly or not-yet.") = ""
    report: options.text("FILE", "Write the table as one offline HTML file.") = ""
    markdown: options.text("FILE", "Write the table as the page of the book.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; an unknown area or state is misuse."""
    given, wrong = options.read(Options, argv, command="papers", description=DESCRIPTION)
    wrong += unwritable(given.report, "--report") + unwritable(given.markdown, "--markdown")
    from meshwright.papers.record import areas, papers
    from meshwright.papers.state import STATES, states

    state = given.state.replace("-", " ").lower()
    for word, known, option in ((given.area, areas(), "--area"), (state, STATES, "--state")):
        if word and word not in known:
            help = nearest(word, list(known))
            wrong.append(Diagnostic(code="J002", message=f"no {option[2:]} {word!r}", place=option, help=help))
    if wrong:
        raise MeshwrightError(wrong)
    found = states(report=note)
    rows = [(p, found[p.id]) for p in papers().values() if given.area in ("", p.area)]
    rows = [(p, s) for p, s in rows if state in ("", s.state)]
    if given.json:
        listed = [{**msgspec.to_builtins(p), **msgspec.to_builtins(s)} for p, s in rows]
        print_json({"format_version": FORMAT_VERSION, "papers": listed})
    else:
        from meshwright.report.papers_text import table

        table(rows, console())
    if given.report:
        from meshwright.report.papers_html import write_table

        write_table(rows, given.report)
        note(f"wrote {given.report}")
    if given.markdown:
        from meshwright.report.papers_markdown import write

        write(rows, given.markdown)
        note(f"wrote {given.markdown}")
    return 0
