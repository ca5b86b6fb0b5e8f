"""Rows of the tables' format, made by hand."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

STEP_COLUMNS = (
    *("id", "source", "source_ref", "licence_class", "hardware", "gpus_per_node", "num_gpus", "network", "framework"),
    *(
        "model",
        "phase",
        "params_b",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "gated_mlp",
        "tied_embeddings",
    ),
    *(
        "experts",
        "top_k",
        "moe_ffn",
        "seq_len",
        "global_batch_seqs",
        "micro_batch_seqs",
        "grad_accum",
        "tp",
        "pp",
        "vpp",
        "cp",
    ),
    *("ep", "dp", "zero_stage", "sequence_parallel", "recompute", "schedule", "dtype"),
    *("optimizer_state_bytes_per_param", "attention_kernel", "outcome", "step_time_s"),
    *("tokens_per_s_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu", "peak_memory_gb"),
    *("memory_kind", "steady_memory_gb", "activation_memory_gb", "metric", "value", "unit", "flags", "notes"),
)
STEP = {
    "id": "a:0",
    "source": "hand",
    "hardware": "h100_sxm",
    "gpus_per_node": "8",
    "num_gpus": "8",
    "network": "NVLink",
    "framework": "megatron-core",
    "model": "small",
    "phase": "pretrain",
    "params_b": "1.3",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "16",
    "ffn": "8192",
    "vocab": "51200",
    "gated_mlp": "False",
    "seq_len": "2048",
    "global_batch_seqs": "64",
    "micro_batch_seqs": "2",
    "tp": "2",
    "pp": "1",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "4",
    "zero_stage": "1",
    "sequence_parallel": "True",
    "recompute": "none",
    "schedule": "1f1b",
    "dtype": "bf16",
    "attention_kernel": "flash",
    "outcome": "ok",
    "step_time_s": "0.5",
    "peak_memory_gb": "30",
    "memory_kind": "allocated",
}
GEMM = {
    "source": "hand",
    "hardware": "h100_sxm",
    "backend": "torch",
    "backend_version": "2",
    "kernel": "linear",
    "dtype": "bf16",
    "pass": "fwd",
    "batch": "1",
    "m": "4096",
    "n": "4096",
    "k": "4096",
    "latency_us": "210",
}
COLLECTIVE = {
    "source": "hand",
    "hardware": "h100_sxm",
    "nodes": "1",
    "gpus": "8",
    "gpus_per_node": "8",
    "network": "NVLink4 NVSwitch",
    "op": "all_reduce",
    "library": "nccl 2.27.3",
    "variant": "",
    "bytes": "1073741824",
    "dtype": "half",
    "latency_us": "4000",
    "busbw_gbps": "",
    "flag": "",
}


def step(**changed: object) -> dict[str, str]:
    """A row of ``training_steps``: a 1.3B model on eight H100, with some cells changed."""
    return dict.fromkeys(STEP_COLUMNS, "") | STEP | {name: str(value) for name, value in changed.items()}


def gemm(**changed: object) -> dict[str, str]:
    return GEMM | {name: str(value) for name, value in changed.items()}


def collective(**changed: object) -> dict[str, str]:
    return COLLECTIVE | {name: str(value) for name, value in changed.items()}


def table(folder: Path, name: str, rows: list[dict[str, str]], *, packed: bool = False) -> Path:
    """Writes a table and returns its path."""
    path = folder / f"{name}.csv{'.gz' if packed else ''}"
    with gzip.open(path, "wt", newline="") if packed else path.open("w", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        lines.writerows(rows)
    return path
