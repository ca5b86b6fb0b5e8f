"""Answers that are sheets: printed, or written as the options say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic


def unwritable_files(given: Any) -> list[Diagnostic]:
    """X104 for files of a sheet that cannot be written."""
    return [*unwritable(given.report, "--report"), *unwritable(given.trace, "--trace")]


def show(prediction: Any, sheet: Callable[[Any], Any], given: Any) -> int:
    """Print an answer and write its files; 0 when it fits, 1 when not."""
    if given.json:
        print_json(prediction.to_json())
    else:
        from meshwright.report.sheet_text import render

        render(sheet(prediction), console())
    if given.report:
        from meshwright.report.sheet_html import write

        write(sheet(prediction), given.report)
        note(f"wrote {given.report}")
    if given.trace:
        from meshwright.trace.chrome import write

        write(prediction.times.timeline, given.trace)
        note(f"wrote {given.trace}")
    return 0 if prediction.fits else 1
