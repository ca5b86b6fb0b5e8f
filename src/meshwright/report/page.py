"""Printing to a terminal of any width and encoding: titles, rows without lines, quiet remarks."""

from __future__ import annotations

from itertools import zip_longest
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.report.bars import is_unicode

#: Columns from which a row has room for a description.
WIDE = 100
#: Columns of a cell that does not wrap while longer ones can.
SHORT = 10


class Page:
    """Collects what is printed and hands it to the console's file at the end, with what its encoding cannot show
    (a model's name can be anything) replaced by ``?``."""

    def __init__(self, console: Console):
        self.console = console
        self.unicode = is_unicode(console)
        self.width = console.width

    def __enter__(self) -> Page:
        self._capture = self.console.capture()
        self._capture.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._capture.__exit__(kind, error, trace)
        if kind is None:
            encoding = self.console.encoding
            lines = "\n".join(line.rstrip() for line in self._capture.get().split("\n"))
            self.console.file.write(lines.encode(encoding, "replace").decode(encoding))

    def print(self, what: RenderableType = "", *, indent: int = 0, one_line: bool = False) -> None:
        shown = Padding(what, (0, 0, 0, indent), expand=False) if indent else what
        self.console.print(shown, no_wrap=one_line, overflow="crop" if one_line else None)

    def title(self, title: str) -> None:
        self.console.print()
        self.console.print(Text(title, "bold"))

    def quiet(self, remark: str) -> None:
        self.print(Text(remark, "dim"), indent=2)

    def rows(self, rows: list[tuple[Text, ...]]) -> None:
        """A table without lines, indented by two; columns wrap rather than lose text."""
        widths = [max((cell.cell_len for cell in column if cell), default=0) for column in zip_longest(*rows)]
        if (
            rows
            and sum(widths) + 2 * len(widths) <= self.width
            and not any("\n" in c.plain for row in rows for c in row)
        ):
            justify = [cell.justify or "left" for cell in rows[-1]]
            self.console.print(Text("\n").join(_line(row, widths, justify) for row in rows), soft_wrap=True)
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        widths = [max((_widest(c) for c in column if c), default=0) for column in zip_longest(*rows)]
        words = [max((_longest(c) for c in column if c), default=0) for column in zip_longest(*rows)]
        for index, width in enumerate(_fitted(widths, words, self.console.width - 2 * len(widths))):
            table.add_column(justify=rows[-1][index].justify or "left", overflow="fold", width=width)
        for row in rows:
            table.add_row(*row)
        self.print(table, indent=2)


def _widest(cell: Text) -> int:
    """Columns of a cell's widest line."""
    return max(map(cell_len, cell.plain.split("\n")))


def _longest(cell: Text) -> int:
    """Columns of a cell's longest word; a short cell is one, as a number with its unit is, and what does not wrap."""
    wide = _widest(cell)
    return wide if wide <= SHORT or cell.no_wrap else max((cell_len(word) for word in cell.plain.split()), default=0)


def _fitted(widths: list[int], words: list[int], room: int) -> list[int]:
    """Widths that add up to `room`: the widest give way first, but keep their longest words whole while others can."""
    most = max(words, default=0)
    while most > 1 and sum(min(word, most) for word in words) > room:
        most -= 1
    widths = [*widths]
    while sum(widths) > room:
        loose = [i for i, width in enumerate(widths) if width > max(1, min(words[i], most))]
        if not loose:
            break
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def _line(row: tuple[Text, ...], widths: list[int], justify: list[str]) -> Text:
    """A row of cells of these widths, as a table would write it where nothing has to wrap, in a tenth of the time."""
    line = Text()
    for cell, width, side in zip(row, widths, justify):
        blank = " " * (width - cell.cell_len)
        line.append("  ")
        if (cell.justify or side) == "right":
            line.append(blank).append_text(cell)
        else:
            line.append_text(cell).append(blank)
    return line
