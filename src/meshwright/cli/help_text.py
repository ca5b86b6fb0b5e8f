"""The help of a command as text: its usage, what it does, and its options in two columns.

Lines are as wide as the terminal, and at most 100 columns. tyro, which reads odd options, does not wrap what a command
says of itself, so that a terminal breaks it inside words.
"""

from __future__ import annotations

from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill, wrap

#: Columns of a line at most, and of the left column, which a longer name has a line of its own beside.
MOST_COLUMNS, LEFT_COLUMNS = 100, 24

Row = tuple[str, str]


def help_text(command: str, description: str, arguments: Sequence[Row], options: Sequence[Row]) -> str:
    """Return the help of `command`: each argument and option is how it is written, and what it says."""
    width = min(get_terminal_size().columns, MOST_COLUMNS)
    names = [name.split()[0].rstrip(",") for name, _ in arguments]
    usage = " ".join([f"usage: meshwright {command}", *names, "[OPTIONS]"])
    said = [fill(" ".join(part.split()), width, break_on_hyphens=False) for part in description.split("\n\n")]
    rows = [("-h, --help", "Show this help and exit."), *options]
    left = 2 + min(max(len(name) for name, _ in [*arguments, *rows]) + 2, LEFT_COLUMNS)
    shown = [_table("arguments:", arguments, left, width)] if arguments else []
    return "\n\n".join([usage, *said, *shown, _table("options:", rows, left, width)])


def _table(head: str, rows: Sequence[Row], left: int, width: int) -> str:
    lines = [head]
    for name, text in rows:
        first, *rest = wrap(text, max(width - left, 20), break_on_hyphens=False) or [""]
        beside = len(name) + 4 <= left
        lines += [f"  {name}".ljust(left) + first] if beside else [f"  {name}", " " * left + first]
        lines += [" " * left + line for line in rest]
    return "\n".join(lines)
