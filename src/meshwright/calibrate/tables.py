"""Op tables as CSV: read, checked, refused with file, line and reason when they cannot be measurements.

One row is one kernel or layer on one device; units are in the column names. ``.csv`` and ``.csv.gz`` are read.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import Diagnostic, MeshwrightError, nearest

#: Table -> columns that must be there: text, then numbers that must be positive, then numbers that may be zero.
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "ops_gemm": (
        ("source", "hardware", "backend", "backend_version", "dtype", "pass"),
        ("batch", "m", "n", "k", "latency_us"),
        (),
    ),
    "ops_attention": (
        ("source", "hardware", "backend", "backend_version", "phase", "dtype", "kv_dtype", "causal"),
        ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "latency_us"),
        ("window",),
    ),
    "ops_mla": (
        ("source", "hardware", "backend", "backend_version", "scope", "phase", "dtype", "kv_dtype"),
        ("batch", "heads", "latency_us"),
        (),
    ),
    "ops_moe": (
        ("source", "hardware", "backend", "backend_version", "dtype", "gated", "distribution"),
        ("tokens", "hidden", "ffn", "experts", "top_k", "tp", "ep", "latency_us"),
        (),
    ),
    "ops_ssm": (
        ("source", "hardware", "backend", "backend_version", "op", "kernel", "phase", "dtype"),
        ("batch", "seq_len", "latency_us"),
        (),
    ),
}
#: Columns of which a row fills those that its kind of layer has.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "ops_mla": ("kv_len", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "ops_ssm": ("d_conv", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_state", "n_groups"),
}
#: As many faults are listed; the rest are counted.
MOST_SHOWN = 20


class TableRow(NamedTuple):
    """One row: text and numbers by column name, and the line of the file it stands on."""

    line: int
    text: dict[str, str]
    number: dict[str, float]


def find(folder: Path, table: str) -> Path | None:
    """The file of a table in a folder, plain or gzipped; None when it has none."""
    for ending in (".csv", ".csv.gz"):
        path = folder / f"{table}{ending}"
        if path.is_file():
            return path
    return None


def read(path: Path, table: str, *, hardware: str = "") -> list[TableRow]:
    """The rows of a table, of one device's name only when `hardware` is given.

    Raises:
        MeshwrightError: K001 for a file that is no CSV, K002 for missing columns, K003 for every cell that is no
            positive finite number.
    """
    text, positive, zero = COLUMNS[table]
    optional = OPTIONAL.get(table, ())
    rows, wrong = [], Faults(path)
    for line, cells in _lines(path, text + positive + zero + optional):
        if hardware and cells["hardware"] != hardware:
            continue
        number = {}
        for name in positive + zero + optional:
            value = _number(cells[name] or "0" if name in optional else cells[name])
            if value is None or value < 0 or (value == 0 and name in positive):
                wrong.add("K003", line, f"{name} = {cells[name]!r} is not a positive number")
            else:
                number[name] = value
        rows.append(TableRow(line, {name: cells[name] for name in text}, number))
    wrong.refuse()
    return rows


class Faults:
    """Collects the faults of a file row by row, and raises them together: the first few in full, the others as a
    count."""

    def __init__(self, path: Path):
        self._path = path
        self._found: list[Diagnostic] = []
        self._more = 0

    def add(self, code: str, line: int, message: str, help: str = "") -> None:
        if len(self._found) < MOST_SHOWN:
            self._found.append(Diagnostic(code=code, message=message, place=f"{self._path}:{line}", help=help))
        else:
            self._more += 1

    def refuse(self) -> None:
        """Raise all that was found, if anything."""
        if self._more:
            last = self._found[-1]
            self._found[-1] = Diagnostic(
                code=last.code, message=f"{last.message}; and {self._more} more", place=last.place, help=last.help
            )
        if self._found:
            raise MeshwrightError(self._found)


def _lines(path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            missing = [name for name in wanted if name not in header]
            if missing:
                raise MeshwrightError(
                    Diagnostic(
                        code="K002", message=f"no column {m!r}", place=f"{path}:1", help=nearest(m, list(header))
                    )
                    for m in missing
                )
            for cells in reader:
                yield reader.line_num, {k: v or "" for k, v in cells.items() if isinstance(k, str)}
    except (OSError, UnicodeDecodeError, csv.Error, EOFError, zlib.error) as wrong:
        raise MeshwrightError.one("K001", f"cannot read the table: {wrong}", place=str(path)) from None


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if isfinite(value) else None
