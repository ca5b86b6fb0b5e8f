"""Bars of a terminal: eighths of a cell where the encoding has them, ``#`` where it does not."""

from __future__ import annotations

from rich.console import Console

#: A bar's last cell, filled from the left by 0/8 to 8/8.
EIGHTHS = " ▏▎▍▌▋▊▉█"


def is_unicode(console: Console) -> bool:
    """Whether the console's encoding can show block elements."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def bar(start: float, length: float, width: int, *, unicode: bool) -> str:
    """A bar over [start, start + length) of the unit interval, `width` cells wide, blanks before it.

    Anything longer than nothing shows at least a sliver, so that no entry seems to be absent.
    """
    first = min(int(start * width), width - 1)
    eighths = max(round((start + length) * width * 8) - first * 8, 1) if length > 0 else 0
    eighths = min(eighths, (width - first) * 8)
    if not unicode:
        return " " * first + "#" * -(-eighths // 8)
    whole, rest = divmod(eighths, 8)
    return " " * first + EIGHTHS[8] * whole + (EIGHTHS[rest] if rest else "")


def stacked(shares: list[float], width: int) -> list[int]:
    """Cells of each part of a stacked bar, by largest remainder: they sum to the rounded total, and what is not
    nothing has a cell while there are enough."""
    exact = [share * width for share in shares]
    cells = [int(e) for e in exact]
    missing = round(sum(exact)) - sum(cells)
    order = sorted(range(len(exact)), key=lambda i: (cells[i] > 0, cells[i] - exact[i]))
    for i in order[: max(missing, 0)]:
        cells[i] += 1
    return cells
