"""``meshwright validate``: how wrong the predictions are, on every measured row of a folder of tables."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import MeshwrightError

DESCRIPTION = """Predict every row of the measurement tables in a folder and score the predictions per source and
hardware. Nothing is fitted; rows with known faults of the measured machine are scored apart.

Exit code 0 whatever the errors are; 2 when the tables cannot be read."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright validate`` takes."""

    data: options.text("DIR", "Folder with training_steps.csv, ops_*.csv, collectives.csv (or .csv.gz).") = ""
    rows: options.text("FILE", "Write every prediction as CSV.") = ""
    report: options.text("FILE", "Write scatter plots and residuals, one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the tables were read."""
    given, wrong = options.read(Options, argv, command="validate", description=DESCRIPTION)
    wrong += options.missing({"data": given.data}, {"data": "--data DIR"}, command="validate")
    wrong += unwritable(given.rows, "--rows") + unwritable(given.report, "--report")
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.cost import standard
    from meshwright.validate.run import to_json, validate, write_rows

    found = validate(Path(given.data), standard, progress=lambda name: note(f"predicting {name}"))
    if given.json:
        print_json(to_json(found))
    else:
        for table in found:
            _show(table)
    if given.rows:
        write_rows(found, Path(given.rows))
        note(f"wrote {given.rows}")
    if given.report:
        from meshwright.validate.report import write

        write(found, Path(given.report))
        note(f"wrote {given.report}")
    return 0


def _show(table) -> None:
    from rich.table import Table as RichTable

    from meshwright.validate.run import COLUMNS, table_lines

    shown = RichTable(title=table.name, title_justify="left", box=None, pad_edge=False)
    shown.add_column("source/hardware", no_wrap=True)
    for heading, _, _ in COLUMNS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for key, cells in table_lines(table):
        shown.add_row(key, *cells)
    out = console()
    out.print(shown)
    for reason, count in sorted(table.unsupported.items(), key=lambda item: -item[1]):
        out.print(f"  unsupported: {count} rows: {reason}")
    out.print()
