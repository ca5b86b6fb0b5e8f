"""What commands leave behind: one JSON object or text on stdout, notes on stderr, files where they can be."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """One JSON object on stdout, indented; infinities and NaN become null, as JSON knows neither."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def console() -> Console:
    """stdout for text. Colour only on a terminal, and not with NO_COLOR."""
    from rich.console import Console

    class Stdout(Console):
        """rich would end the program with exit code 1, which here means "does not fit"."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Stdout(file=sys.stdout, highlight=False)


def note(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr)


def unwritable(path: str, option: str) -> list[Diagnostic]:
    """X104 when a file cannot be written there; asked before the work starts. Empty when `path` is "" or fine."""
    if not path:
        return []
    target = Path(path)
    if target.is_dir():
        name = {"--report": "report.html", "--trace": "step.json.gz"}.get(option, "out")
        reason, help = "it is a folder", f"name a file in it: {option} {target / name}"
    elif not target.parent.is_dir():
        reason, help = f"there is no folder {target.parent}", f"make it first: mkdir -p {target.parent}"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        reason, help = "permission denied", "choose a place you may write to"
    else:
        return []
    return [Diagnostic(code="X104", message=f"cannot write {path}: {reason}", place=f"{option} {path}", help=help)]
