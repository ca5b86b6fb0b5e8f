"""A sheet on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from meshwright.quantity import seconds
from meshwright.report.bars import bar
from meshwright.report.page import Page
from meshwright.report.sheet import Lines, Sheet, SheetGrid, SheetSection, Spent, shown

if TYPE_CHECKING:
    from meshwright.search.listed import FoundPlans

#: Cells of a bar.
CELLS = 24


def render(sheet: Sheet, console: Console) -> None:
    """Print a sheet to `console`."""
    with Page(console) as page:
        printed(sheet, page)


def printed(sheet: Sheet, page: Page) -> None:
    """Print a sheet to a page that has begun."""
    page.print(Text(sheet.headline, "bold green" if sheet.fits else "bold red"))
    for caution in (*sheet.cautions, *sheet.warnings):
        page.print(Text(f"! {caution}", "yellow"), indent=2)
    page.print()
    page.rows([(Text(name, "dim"), Text(value)) for name, value in sheet.question])
    for section in (*sheet.sections, *sheet.held, *sheet.elsewhere):
        _section(section, page)
    page.title("Assumptions")
    rows = []
    for one in sheet.assumptions:
        said = f"{one.value} ({one.source})" if one.source else one.value
        rows.append((Text(one.name, "yellow" if one.flagged else "dim"), Text(said)))
    page.rows(rows)


def render_found(
    found: FoundPlans, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], best: Sheet, console: Console
) -> None:
    """Print the best plans that a search `found`, a row each, and the first of them in full."""
    some = f"{found.evaluated} of {found.legal} plans were looked at" if found.stopped else f"{found.evaluated} plans"
    with Page(console) as page:
        page.print(Text(f"{some}, the best:", "bold"))
        grid(SheetGrid("", heads, rows), page)
        page.print()
        printed(best, page)


def grid(section: SheetGrid, page: Page) -> None:
    """Print a table under no title."""
    rows = [tuple(Text(head, "dim") for head in section.heads)]
    for number, cells in enumerate(section.rows):
        rows.append(tuple(Text(cell, "bold" if number == section.chosen else "") for cell in cells))
    page.rows(rows)
    for remark in section.remarks:
        page.quiet(remark)


def _section(section: SheetSection, page: Page) -> None:
    page.title(section.title)
    match section:
        case Lines(_, rows, remarks):
            page.rows([(Text(name, "dim"), *map(Text, cells)) for name, *cells in rows])
            for remark in remarks:
                page.quiet(remark)
        case Spent():
            _spent(section, page)
        case SheetGrid():
            grid(section, page)
        case _:
            for line in section.lines:
                page.quiet(line)


def _spent(section: Spent, page: Page) -> None:
    total, rows = section.total_s, []
    for name, at, spent, words in shown(section):
        drawn = bar(at / total, spent / total, CELLS, unicode=page.unicode)
        rows.append(
            (
                Text(name),
                Text(seconds(spent)),
                Text(f"{spent / total:.1%}"),
                Text(drawn, no_wrap=True),
                Text(words, "dim"),
            )
        )
    page.rows(rows)
