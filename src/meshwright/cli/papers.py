"""``meshwright papers``: every published system that is known, and what of it a user gets."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError, nearest

DESCRIPTION = """Published systems: what each does, and whether its figures are reproduced here.

A row is usable when a word switches the technique on in a case of yours and its headline figures are met; model only
when it is reproduced inside its check; partly when something is off or missing, which is said; and else not yet.
States are those that the checks found for this release. --check runs the checks again, on this machine and with this
code, and says what differs: minutes, of which all that was found is kept when it is interrupted.

Exit code 0; 1: with --check, a state or a figure is another than the shipped one."""
FORMAT_VERSION = 3


class PapersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright papers``."""

    id: options.positional("ID", "Only this one, such as zero-bubble.") = ""
    area: options.text("AREA", "Only this area, such as pipeline.") = ""
    state: options.text("STATE", "Only usable, model-only, partly or not-yet.") = ""
    all: options.switch("List the papers that are not yet reproduced too, rather than count them.") = False
    check: options.switch("Run the checks, and say what differs from the states of the release.") = False
    write: options.text("FILE", "With --check: write the states as those to ship.") = ""
    report: options.text("FILE", "Write the table as one offline HTML file.") = ""
    markdown: options.text("FILE", "Write the table as the page of the book.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; 1 when a check finds another state than the shipped one; an unknown area or state is misuse."""
    given, wrong = options.read(PapersOptions, argv, command="papers", description=DESCRIPTION)
    for option in ("write", "report", "markdown"):
        wrong += unwritable(getattr(given, option), f"--{option}")
    from meshwright.papers.record import areas, paper, papers
    from meshwright.papers.shipped import differences, shipped
    from meshwright.papers.state import STATES

    state = given.state.replace("-", " ").lower()
    for word, known, option in ((given.area, areas(), "--area"), (state, STATES, "--state")):
        if word and word not in known:
            help = nearest(word, list(known))
            wrong.append(Diagnostic(code="J002", message=f"no {option[2:]} {word!r}", place=option, help=help))
    if given.id and given.id.lower() not in papers():
        try:
            paper(given.id)
        except MeshwrightError as error:
            wrong += error.diagnostics
    if given.write:
        wrong += _unfit_to_write(given)
    if wrong:
        raise MeshwrightError(wrong)
    chosen = {name for name, one in papers().items() if given.area in ("", one.area)}
    chosen &= {given.id.lower()} if given.id else chosen
    found = _checked(chosen) if given.check else shipped().states
    differs = differences(shipped().states, found) if given.check else []
    rows = [(papers()[name], found[name]) for name in papers() if name in chosen]
    rows = [(p, s) for p, s in rows if state in ("", s.state)]
    if given.write:
        _write(found, given.write)
    if given.json:
        # of a row's figures the questions are under `asked`, the answers of its state under `figures`
        asked = [{**msgspec.to_builtins(p), "asked": msgspec.to_builtins(p.figures)} for p, _ in rows]
        listed = [said | msgspec.to_builtins(s) for said, (_, s) in zip(asked, rows)]
        told = {name: getattr(shipped(), name) for name in ("version", "digest", "torch", "changed")}
        more = {"differences": [{"paper": name, "what": what} for name, what in differs]} if given.check else {}
        print_json(
            {"format_version": FORMAT_VERSION, "shipped": told, "checked": given.check, "papers": listed, **more}
        )
    else:
        from meshwright.report.papers_text import compared, row, table

        said = "" if given.check else shipped().said
        if given.id and rows:
            row(*rows[0], console(), said=said)
        else:
            table(rows, console(), said=said, folded=not (given.all or state or given.id))
        if given.check:
            compared(found, differs, console())
    if given.report:
        from meshwright.report.papers_html import write_table

        write_table(rows, given.report, said="checked just now" if given.check else shipped().said)
        note(f"wrote {given.report}")
    if given.markdown:
        from meshwright.report.papers_markdown import write

        write(rows, given.markdown)
        note(f"wrote {given.markdown}")
    return 1 if differs and not given.write else 0


def _unfit_to_write(given: PapersOptions) -> list[Diagnostic]:
    """J007 where not everything would be checked; X-codes where what that needs is not installed."""
    part = [name for name in ("id", "area", "state") if getattr(given, name)]
    wrong = [] if given.check else [("--write writes what --check finds", "add --check")]
    wrong += [
        (f"{'an ID' if name == 'id' else f'--{name}'} leaves rows out, and all are shipped", "leave it out")
        for name in part
    ]
    found = [Diagnostic(code="J007", message=what, place="--write", help=help) for what, help in wrong]
    return found + lacking("papers --check --write", "torch")


def _checked(chosen: Collection[str]):
    """Return the states of chosen rows, kept or by running their checks; when interrupted, note how many are kept."""
    from meshwright.cli.progress import Progress
    from meshwright.papers.checking import checked

    try:
        return checked(only=chosen, progress=Progress("checks"))
    except KeyboardInterrupt:
        from meshwright.papers.checking import num_kept

        note(f"{num_kept()} checks are kept: meshwright papers --check goes on from there")
        raise


def _write(found, path: str) -> None:
    from meshwright import __version__
    from meshwright.papers.checking import torch_version
    from meshwright.papers.shipped import write

    write(found, path, version=__version__, torch=torch_version())
    note(f"wrote {path}")
