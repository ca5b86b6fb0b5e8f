"""Rows of op tables as work items: what one measured kernel or layer is in the words of ``work.py``.

The same items the lowering writes, so that a curve fitted to tables prices what a step is made of. A row is the
sum of its ``kernels`` (which a curve answers for) and of its ``around`` (quantisation, permutation, activation:
memory-bound kernels that the layer's time contains and the roofline prices).
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.calibrate.loads import alpha, busiest
from meshwright.calibrate.tables import TableRow
from meshwright.cost.fitted import WEIGHT_ONLY
from meshwright.spec.workload import DTYPE_BYTES, WEIGHT_BYTES
from meshwright.work import AttentionCore, Convolution, Elementwise, Gemm, GroupedGemm, Scan, Work, pairs

#: Phase of an attention row -> the kind of curve it belongs to.
PHASES = {"prefill": "prefill", "decode": "decode", "train_fwd": "flash_fwd", "train_bwd": "flash_bwd"}


#: Libraries of inference engines.
ENGINES = ("trtllm", "vllm", "sglang")


class MeasuredWork(NamedTuple):
    """One row as work: the kind of curve, the precision, its kernels and what runs around them, seconds, the group
    that a holdout takes or leaves whole, and the library where each has a kernel of its own of one name."""

    op: str
    dtype: str
    kernels: tuple[Work, ...]
    around: tuple[Elementwise, ...]
    seconds: float
    group: tuple[int, ...]
    library: str = ""
    engine: bool = False

    @property
    def serving(self) -> bool:
        """Whether the row was measured in an inference engine (``engine``: its table says so): what
        ``cost.fitted.link`` must be told."""
        return self.engine or self.op in ("prefill", "decode", "latent", "grouped_gemm")

    @property
    def flash(self) -> int:
        """The generation of FlashAttention that was measured, 0 for what the device's own generation has."""
        return 2 if self.op in ("flash_fwd", "flash_bwd") else 0


def measured(table: str, row: TableRow) -> MeasuredWork | None:
    """A row of a table as work; None for precisions this package does not compute in."""
    return _READERS[table](row)


def _gemm(row: TableRow) -> MeasuredWork | None:
    dtype, at = row.text["dtype"], row.number
    stored = dtype.removesuffix(WEIGHT_ONLY) if dtype.endswith(WEIGHT_ONLY) else ""
    if dtype not in DTYPE_BYTES and stored not in WEIGHT_BYTES:
        return None
    multiplied = "fp16" if stored else dtype
    m, n, k, batch = int(at["m"]), int(at["n"]), int(at["k"]), int(at["batch"])
    out = 4.0 if dtype == "fp32" else 2.0

    def product(m: int, n: int, k: int) -> Gemm:
        return Gemm(m=m, n=n, k=k, batch=batch, dtype=multiplied, out_bytes=out, weights=stored)

    kernels = (product(m, n, k),) if row.text["pass"] == "fwd" else (product(m, k, n), product(k, n, m))
    around = (Elementwise(num_bytes=m * k * 3.0 * batch, fused=True),) if DTYPE_BYTES[multiplied] < 2 else ()
    engine = row.text["backend"] in ENGINES
    return MeasuredWork("gemm", dtype, kernels, around, at["latency_us"] * 1e-6, (n, k), engine=engine)


def _attention(row: TableRow) -> MeasuredWork | None:
    at, text = row.number, row.text
    # Rows labelled bf16 with an fp8 cache run as fast as fp8 alone: the kernel computes in fp8.
    dtype = "fp8" if "fp8" in (text["dtype"], text["kv_dtype"]) else text["dtype"]
    if dtype not in DTYPE_BYTES or text["phase"] not in PHASES:
        return None
    head_dim, q, kv = int(at["head_dim"]), int(at["q_len"]), int(at["kv_len"])
    work = AttentionCore(
        batch=int(at["batch"]),
        q_len=q,
        kv_len=kv,
        heads=int(at["heads"]),
        kv_heads=int(at["kv_heads"]),
        head_dim=head_dim,
        v_head_dim=head_dim,
        pairs=pairs(q, kv, causal=text["causal"] == "True", window=at["window"]),
        dtype=dtype,
        backward=text["phase"] == "train_bwd",
    )
    group = (work.heads, head_dim)
    return MeasuredWork(PHASES[text["phase"]], dtype, (work,), (), at["latency_us"] * 1e-6, group)


def _latent(row: TableRow) -> MeasuredWork | None:
    """One query over a compressed cache; prompts expand it and whole layers contain products, which other curves
    price."""
    at, text = row.number, row.text
    dtype = "fp8" if "fp8" in (text["dtype"], text["kv_dtype"]) else text["dtype"]
    if dtype not in DTYPE_BYTES or text["scope"] != "kernel" or text["phase"] != "decode":
        return None
    rank, keys = int(at["kv_lora_rank"]), int(at["kv_len"])
    work = AttentionCore(
        batch=int(at["batch"]),
        q_len=1,
        kv_len=keys,
        heads=int(at["heads"]),
        kv_heads=1,
        head_dim=rank + int(at["qk_rope_head_dim"]),
        v_head_dim=rank,
        pairs=float(keys),
        dtype=dtype,
    )
    return MeasuredWork("latent", dtype, (work,), (), at["latency_us"] * 1e-6, (work.heads,))


def _moe(row: TableRow) -> MeasuredWork | None:
    dtype, at = row.text["dtype"], row.number
    if dtype not in DTYPE_BYTES:
        return None
    tokens, experts, top_k, ep = (int(at[name]) for name in ("tokens", "experts", "top_k", "ep"))
    hidden, ffn = int(at["hidden"]), int(at["ffn"] // at["tp"])
    rows, active = busiest(tokens, experts, top_k, ep, alpha(row.text["distribution"]))
    mean = max(1, tokens * top_k // ep)
    up = 2 * ffn if row.text["gated"] == "True" else ffn
    common = {"groups": max(1, round(active)), "rows": mean, "imbalance": rows / mean, "dtype": dtype}
    moved = 2.0 * (rows + tokens) * hidden
    joined = moved
    if row.text["backend"] == "sglang":
        # Results stay in place, one per choice: those of other ranks' experts are filled with zeros and summed too.
        joined = 2.0 * (tokens * top_k * (2 if ep > 1 else 1) + tokens) * hidden
    around = [
        Elementwise(num_bytes=moved, kernels=2, fused=True),
        Elementwise(num_bytes=2.0 * rows * (up + ffn), fused=True),
        Elementwise(num_bytes=joined, kernels=2, fused=True),
    ]
    if DTYPE_BYTES[dtype] < 2:
        around += [Elementwise(num_bytes=rows * width * 3.0, fused=True) for width in (hidden, ffn)]
    kernels = (GroupedGemm(n=up, k=hidden, **common), GroupedGemm(n=hidden, k=ffn, **common))
    group = (experts // ep, hidden, ffn)
    return MeasuredWork("grouped_gemm", dtype, kernels, tuple(around), at["latency_us"] * 1e-6, group)


#: Kernels that training runs too; those written for serving alone are others (FlashInfer's scan is six times as fast).
SCANS = ("chunk_gated_delta_rule",)
CONVOLUTIONS = ("causal_conv1d_fn",)
#: Tokens that the measured scans multiply at once (fla-org/flash-linear-attention).
CHUNK = 64


def _ssm(row: TableRow) -> MeasuredWork | None:
    at, text = row.number, row.text
    if text["phase"] != "prefill" or text["dtype"] not in DTYPE_BYTES:
        return None
    batch, seq, heads = int(at["batch"]), int(at["seq_len"]), int(at["num_v_heads"])
    keys, values = int(at["num_k_heads"]) * int(at["head_k_dim"]), heads * int(at["head_v_dim"])
    seconds = at["latency_us"] * 1e-6
    if text["kernel"] in CONVOLUTIONS:
        maps = int(at["n_groups"]) * int(at["d_state"]) if text["op"] == "mamba2" else keys
        work = Convolution(batch=batch, seq_len=seq, channels=values + 2 * maps, kernel=max(1, int(at["d_conv"])))
        return MeasuredWork("convolution", text["dtype"], (work,), (), seconds, (work.channels,))
    if text["kernel"] not in SCANS or seq == 1:  # a single token is the step of a recurrence, not a scan by chunks
        return None
    scan = Scan(
        rule="delta",
        batch=batch,
        seq_len=seq,
        heads=heads,
        groups=int(at["num_k_heads"]),
        k_dim=int(at["head_k_dim"]),
        v_dim=int(at["head_v_dim"]),
        chunk=CHUNK,
    )
    return MeasuredWork("scan", text["dtype"], (scan,), (), seconds, (scan.heads, scan.groups), text["backend"])


_READERS = {
    "ops_ssm": _ssm,
    "ops_gemm": _gemm,
    "ops_attention": _attention,
    "ops_mla": _latent,
    "ops_moe": _moe,
}
