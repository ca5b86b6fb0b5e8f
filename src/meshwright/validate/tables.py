"""Reading measurement tables: CSV, gzipped or not, by the documented column names."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from meshwright.calibrate.tables import Faults
from meshwright.errors import MeshwrightError

#: Every table of the format, in the order in which they are predicted.
NAMES = (
    *("training_steps", "finetune_steps", "ops_gemm", "ops_attention", "ops_mla", "ops_moe", "ops_ssm"),
    *("collectives", "serving_runs"),
)
#: Tables whose rows are steps of a training job.
STEPS = ("training_steps", "finetune_steps")
_OF_STEPS = (
    *("id", "source", "hardware", "gpus_per_node", "num_gpus", "network", "framework", "model", "phase"),
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated_mlp", "tied_embeddings"),
    *("experts", "top_k", "moe_ffn", "seq_len", "global_batch_seqs", "micro_batch_seqs"),
    *("tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "sequence_parallel", "recompute", "schedule", "dtype"),
    *("optimizer_state_bytes_per_param", "attention_kernel"),
    *("outcome", "step_time_s", "peak_memory_gb", "memory_kind", "flags", "notes"),
)
_ASKED_OF_STEPS = (
    *("gpus_per_node", "num_gpus", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts"),
    *("top_k", "moe_ffn", "seq_len", "global_batch_seqs", "micro_batch_seqs", "grad_accum", "tp", "pp", "vpp"),
    *("cp", "ep", "dp", "zero_stage", "optimizer_state_bytes_per_param"),
)
#: Columns a table must have: those that say what was run, and what came of it. The op tables' readers hold theirs.
REQUIRED = {
    **dict.fromkeys(STEPS, _OF_STEPS),
    "serving_runs": (
        *("id", "source", "hardware", "engine", "model", "precision", "mode", "load_type", "isl", "osl"),
        *("concurrency", "rate_req_s", "batch_size", "tp", "pp", "dp", "ttft_ms", "tpot_ms"),
        *("throughput_tok_s_per_gpu", "num_requests", "flags"),
    ),
    "serving_requests": (
        *("run", "engine", "model", "hardware", "prompt_tokens", "output_tokens", "arrival_s", "first_token_s"),
        "last_token_s",
    ),
}
#: Columns of it that hold what was asked, as numbers.
NUMBERS = {
    **dict.fromkeys(STEPS, _ASKED_OF_STEPS),
    "serving_runs": (
        *("isl", "osl", "concurrency", "rate_req_s", "batch_size", "tp", "pp", "dp", "num_requests"),
        *("ttft_ms", "tpot_ms", "throughput_tok_s_per_gpu", "ep", "num_gpus"),
        *(f"{half}_{said}" for half in ("prefill", "decode") for said in ("workers", "tp", "pp", "dp", "ep")),
    ),
    "serving_requests": ("prompt_tokens", "output_tokens", "arrival_s", "first_token_s", "last_token_s"),
}


def find(folder: Path, name: str) -> Path | None:
    """The file of a table in a folder, plain or gzipped."""
    for ending in (".csv", ".csv.gz"):
        path = folder / f"{name}{ending}"
        if path.exists():
            return path
    return None


def rows(path: Path, name: str) -> Iterator[dict[str, str]]:
    """The rows of a table as texts; see :func:`numbered`."""
    return (row for _, row in numbered(path, name))


def numbered(path: Path, name: str) -> list[tuple[int, dict[str, str]]]:
    """The rows of a table as texts, each with the line it ends on.

    Raises:
        MeshwrightError: V001 unreadable, V002 with every missing column, V004 with every cell of a question that is
            no number.
    """
    reader = csv.DictReader(io.StringIO(text_of(path)))
    missing = [c for c in REQUIRED[name] if c not in (reader.fieldnames or ())]
    if missing:
        raise MeshwrightError.one(
            "V002",
            f"the table has no column {', '.join(missing)}",
            place=f"{path}:1",
            help="the format is described with the tables; every column named there must be present",
        )
    found, wrong = [], Faults(path)
    try:
        for cells in reader:
            row = {column: cell or "" for column, cell in cells.items() if isinstance(column, str)}
            for column in NUMBERS[name]:
                value = number(row, column) if row.get(column) else 0.0
                if value is None or value < 0:
                    wrong.add("V004", reader.line_num, f"{column} = {row[column]!r} is not a positive number")
            found.append((reader.line_num, row))
    except csv.Error as error:
        raise MeshwrightError.one("V001", f"cannot read the table: {error}", place=str(path)) from None
    wrong.refuse()
    return found


def text_of(path: Path) -> str:
    """The text of a table, unpacked.

    Raises:
        MeshwrightError: V001 when it cannot be read.
    """
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        help = "a table is CSV in UTF-8, plain or as .csv.gz"
        raise MeshwrightError.one("V001", f"cannot read the table: {reason}", place=str(path), help=help) from None


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
