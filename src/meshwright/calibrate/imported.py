"""Op tables in the layout of NVIDIA AIConfigurator: Parquet files per operation, read as rows of our own tables.

The layout as its collector writes it (ai-dynamo/aiconfigurator): latencies in milliseconds, precisions by their
torch names, one new token a sequence when generating. Needs pyarrow: the extra ``[import]``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.calibrate.tables import Faults, TableRow
from meshwright.errors import MeshwrightError

#: Our table -> the files that make it up.
FILES = {
    "ops_gemm": ("gemm_perf.parquet",),
    "ops_attention": ("context_attention_perf.parquet", "generation_attention_perf.parquet"),
    "ops_moe": ("moe_perf.parquet",),
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: Columns of each file that must be there, besides "latency".
COLUMNS = {
    "gemm_perf.parquet": ("gemm_dtype", "m", "n", "k"),
    "moe_perf.parquet": (
        "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
        "distribution",
    ),
    "context_attention_perf.parquet": (
        "attn_dtype", "kv_cache_dtype", "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim",
        "window_size",
    ),
    "generation_attention_perf.parquet": (
        "attn_dtype", "kv_cache_dtype", "batch_size", "step", "num_heads", "num_key_value_heads", "head_dim",
        "window_size",
    ),
}  # fmt: skip


def find(folder: Path, table: str) -> list[Path]:
    """The Parquet files of a table below a folder.

    Raises:
        MeshwrightError: K011 when there are several of one name, as of two backends or versions.
    """
    found = []
    for name in FILES.get(table, ()):
        same = sorted(folder.rglob(name))
        if len(same) > 1:
            places = ", ".join(str(p.parent.relative_to(folder)) for p in same[:4])
            raise MeshwrightError.one(
                "K011", f"{len(same)} files {name}", place=str(folder), help=f"name the folder of one: {places}"
            )
        found += same
    return found


def read(path: Path, device: str) -> list[TableRow]:
    """The rows of one file, measured on `device`.

    Raises:
        MeshwrightError: K006 without pyarrow, K001 for a file that is no Parquet, K002 for missing columns, K003 for
            every row whose sizes or latency are not positive numbers.
    """
    cells = _cells(path)
    missing = [name for name in (*COLUMNS[path.name], "latency") if cells and name not in cells[0]]
    if missing:
        raise MeshwrightError.one("K002", f"no column {', '.join(missing)}", place=str(path))
    convert, rows, wrong = _CONVERT[path.name], [], Faults(path)
    for line, row in enumerate(cells, start=1):
        try:
            text, number = convert(row)
            number = {name: float(value) for name, value in number.items()}
        except (TypeError, ValueError) as fault:
            wrong.add("K003", line, f"row {line}: {fault}")
            continue
        bad = [n for n, v in number.items() if not isfinite(v) or v < 0 or (v == 0 and n != "window")]
        if bad:
            wrong.add("K003", line, f"row {line}: {bad[0]} = {number[bad[0]]} is not a positive number")
            continue
        common = {"source": "aiconfigurator", "hardware": device, "backend": _backend(row)}
        rows.append(TableRow(line, {**common, "backend_version": str(row.get("version", "")), **text}, number))
    wrong.refuse()
    return rows


def _cells(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MeshwrightError.one(
            "K006", "reading Parquet needs pyarrow", place=str(path), help="pip install 'meshwright[import]'"
        ) from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as fault:
        raise MeshwrightError.one("K001", f"cannot read the table: {fault}", place=str(path)) from None


def _backend(row: dict[str, Any]) -> str:
    name = str(row.get("framework", "")).lower()
    return {"tensorrt-llm": "trtllm", "trt-llm": "trtllm"}.get(name, name)


def _dtype(name: Any) -> str:
    return DTYPES.get(str(name), str(name))


def _gemm(row: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    text = {"dtype": _dtype(row["gemm_dtype"]), "pass": "fwd"}
    return text, {"batch": 1, "m": row["m"], "n": row["n"], "k": row["k"], "latency_us": _us(row)}


def _moe(row: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    spread = str(row["distribution"])
    text = {
        "dtype": _dtype(row["moe_dtype"]),
        "gated": str("nongated" not in str(row.get("kernel_source", ""))),
        "distribution": "balanced" if spread == "uniform" else spread,
    }
    number = {
        "tokens": row["num_tokens"],
        "hidden": row["hidden_size"],
        "ffn": row["inter_size"],
        "experts": row["num_experts"],
        "top_k": row["topk"],
        "tp": row["moe_tp_size"],
        "ep": row["moe_ep_size"],
        "latency_us": _us(row),
    }
    return text, number


def _attention(phase: str) -> Callable[[dict[str, Any]], tuple[dict[str, str], dict[str, Any]]]:
    def convert(row: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        text = {"phase": phase, "causal": "True"}
        text |= {"dtype": _dtype(row["attn_dtype"]), "kv_dtype": _dtype(row["kv_cache_dtype"])}
        # generating: one new token behind `step` that are cached
        new, keys = (row["isl"], row["isl"]) if phase == "prefill" else (1, row["step"] + 1)
        number = {
            "batch": row["batch_size"],
            "q_len": new,
            "kv_len": keys,
            "heads": row["num_heads"],
            "kv_heads": row["num_key_value_heads"],
            "head_dim": row["head_dim"],
            "window": row["window_size"],
            "latency_us": _us(row),
        }
        return text, number

    return convert


def _us(row: dict[str, Any]) -> float:
    return row["latency"] * 1e3


_CONVERT = {
    "gemm_perf.parquet": _gemm,
    "moe_perf.parquet": _moe,
    "context_attention_perf.parquet": _attention("prefill"),
    "generation_attention_perf.parquet": _attention("decode"),
}
