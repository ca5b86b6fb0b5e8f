"""Every prediction as a line of one CSV: collected while rows are predicted, written when all of them are."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.atomic import write_bytes

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
    "measured_tpot",
    "predicted_tpot",
    "measured_ttft",
    "predicted_ttft",
    "measured_throughput",
    "predicted_throughput",
    "flags",
    "unsupported",
)
Sink = Callable[[dict[str, object]], None]


def ignore(row: dict[str, object]) -> None:
    """The sink when nobody asked for the rows."""


@contextmanager
def writer(path: Path) -> Iterator[Sink]:
    """A sink that writes to `path` when the block ends. Whatever ends it early, an interruption too, writes nothing.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    text = io.StringIO()
    lines = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    lines.writeheader()
    yield lambda row: lines.writerow({k: _cell(v) for k, v in row.items()})
    write_bytes(path, text.getvalue().encode())


def _cell(value: object) -> object:
    """Floats to nine digits: more than a measurement has, and a third of the file."""
    return f"{value:.9g}" if isinstance(value, float) else "" if value is None else value
