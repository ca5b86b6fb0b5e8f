"""Every prediction as a line of one CSV: written while rows are predicted, in place only when all of them are."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError

#: Columns of the file. Times are in seconds, sizes in bytes; ``shape`` is a kernel's or a collective's, ``plan`` a
#: step's; ``scored_time`` says whether the row's time counts in its main key.
COLUMNS = (
    "table",
    "id",
    "source",
    "hardware",
    "plan",
    "shape",
    "assumed",
    "measured_s",
    "predicted_s",
    "low_s",
    "high_s",
    "trivial_s",
    "roofline_s",
    "extrapolated",
    "scored_time",
    "outcome",
    "fits",
    "memory_kind",
    "measured_memory_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "flags",
    "unsupported",
)
Sink = Callable[[dict[str, object]], None]


def ignore(row: dict[str, object]) -> None:
    """The sink when nobody asked for the rows."""


@contextmanager
def writer(path: Path) -> Iterator[Sink]:
    """A sink that writes to `path`. Whatever ends the block early, an interruption too, leaves no file behind.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise MeshwrightError.one("X104", f"cannot write {path}: {error.strerror or error}") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            lines.writeheader()
            yield lambda row: lines.writerow({k: _cell(v) for k, v in row.items()})
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cell(value: object) -> object:
    """Floats to nine digits: more than a measurement has, and a third of the file."""
    return f"{value:.9g}" if isinstance(value, float) else "" if value is None else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
