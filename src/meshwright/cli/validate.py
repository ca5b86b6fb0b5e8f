"""``meshwright validate``: how wrong the predictions are, on every measured row of a folder of tables."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.progress import Progress
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from meshwright.validate.run import Table

DESCRIPTION = """Predict every row of the measurement tables in a folder and score the predictions per source and
hardware. Nothing is fitted unless --left-out asks for it; rows with known faults of the measured machine are scored
apart.

Exit code 0 whatever the errors are; 2 when the tables cannot be read."""


class ValidateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright validate``."""

    data: options.text(
        "DIR",
        "Folder with training_steps.csv, ops_*.csv, collectives.csv, serving_runs.csv (or .csv.gz), "
        "and serving_requests/.",
    ) = ""
    rows: options.text("FILE", "Write every prediction as CSV.") = ""
    report: options.text("FILE", "Write scatter plots and residuals, one offline HTML file.") = ""
    markdown: options.text("FILE", "Write the accuracy page of the book: tables, constants, where they are from.") = ""
    left_out: options.switch(
        "Fit frameworks again without each shape of model, device and source, and score what was left out (minutes)."
    ) = False
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the tables were read."""
    given, wrong = options.read(ValidateOptions, argv, command="validate", description=DESCRIPTION)
    wrong += options.missing({"data": given.data}, {"data": "--data DIR"}, command="validate")
    for path, option in ((given.rows, "--rows"), (given.report, "--report"), (given.markdown, "--markdown")):
        wrong += unwritable(path, option)
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.cost import standard
    from meshwright.validate.rows import ignore, writer
    from meshwright.validate.run import to_json, validate

    with writer(Path(given.rows)) if given.rows else nullcontext(ignore) as sink:
        found = validate(Path(given.data), standard, progress=Progress(), sink=sink)
    if given.left_out:
        from meshwright.validate.left_out import left_out

        found += left_out(Path(given.data), note)
    if given.json:
        print_json(to_json(found))
    else:
        for table in found:
            _show(table)
        _show_excluded(found)
    if given.report:  # rows of servers have several times each, which are not plotted
        _write_report([table for table in found if not table.name.startswith("serving_")], Path(given.report))
    if given.markdown:
        _write_markdown(found, Path(given.markdown))
    for path in filter(None, (given.rows, given.report, given.markdown)):
        note(f"wrote {path}")
    return 0


def _write_report(found: list[Table], path: Path) -> None:
    from meshwright.report import validation

    validation.write(found, path)


def _write_markdown(found: list[Table], path: Path) -> None:
    from meshwright.validate import accuracy

    accuracy.write(found, path)


def _show(table: Table) -> None:
    from rich import table as rich_table

    from meshwright.validate import text

    shown = rich_table.Table(title=table.name, title_justify="left", box=None, pad_edge=False)
    shown.add_column("source/hardware", no_wrap=True)
    for heading, _, _ in text.columns(table):
        shown.add_column(heading, justify="right", no_wrap=True)
    for key, cells in text.lines(table):
        shown.add_row(key, *cells)
    out = _wide(shown)
    out.print(shown)
    for reason, count in table.reasons():
        out.print(f"  unsupported: {count:,} rows: {reason}", markup=False, soft_wrap=True)
    for what, figures in table.beside.items():
        said = ", ".join(text.figure(name, value) for name, value in figures.items())
        out.print(f"  {what}: {said}", markup=False, soft_wrap=True)
    out.print()


def _wide(shown: RenderableType) -> Console:
    """stdout as wide as a table needs: a figure cut short is worth less than a wrapped line."""
    out = console()
    needed = out.measure(shown, options=out.options.update(width=1000)).maximum
    out.width = max(out.width, needed)
    return out


def _show_excluded(found: list[Table]) -> None:
    from meshwright.validate.faults import FAULTS

    out = console()
    for table in found:
        for flag, reason in FAULTS.get(table.name, {}).items():
            out.print(
                f"{table.name}: rows flagged {flag} are left out of time: {reason}",
                markup=False,
                style="dim",
                soft_wrap=True,
            )
