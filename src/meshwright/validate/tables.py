"""Reading measurement tables: CSV, gzipped or not, by the documented column names."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import MeshwrightError

#: Columns a table must have to be what its name says.
REQUIRED = {
    "training_steps": (
        "id",
        "source",
        "hardware",
        "num_gpus",
        "framework",
        "layers",
        "hidden",
        "outcome",
        "step_time_s",
    ),
    "ops_gemm": ("hardware", "dtype", "pass", "batch", "m", "n", "k", "latency_us"),
    "ops_attention": ("hardware", "phase", "batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "latency_us"),
    "ops_moe": ("hardware", "dtype", "tokens", "hidden", "ffn", "experts", "top_k", "tp", "ep", "latency_us"),
    "collectives": ("hardware", "nodes", "gpus", "op", "library", "bytes", "latency_us"),
}


def find(folder: Path, name: str) -> Path | None:
    """The file of a table in a folder, plain or gzipped."""
    for ending in (".csv", ".csv.gz"):
        path = folder / f"{name}{ending}"
        if path.exists():
            return path
    return None


def rows(path: Path, name: str) -> Iterator[dict[str, str]]:
    """The rows of a table as texts.

    Raises:
        MeshwrightError: V001 unreadable, V002 with every missing column.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise MeshwrightError.one("V001", f"cannot read the table: {error}", place=str(path)) from None
    reader = csv.DictReader(io.StringIO(text))
    missing = [c for c in REQUIRED[name] if c not in (reader.fieldnames or ())]
    if missing:
        raise MeshwrightError.one(
            "V002",
            f"the table has no column {', '.join(missing)}",
            place=f"{path}:1",
            help="the format is described with the tables; every column named there must be present",
        )
    yield from reader


def number(row: dict[str, str], key: str) -> float | None:
    """A cell as a number, None when empty or not one."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def whole(row: dict[str, str], key: str, default: int = 0) -> int:
    value = number(row, key)
    return default if value is None else int(value)
