"""Rows of op tables as work items: what one measured kernel or layer is in the words of ``work.py``.

The same items the lowering writes, so that a curve fitted to tables prices what a step is made of. A row is the
sum of its ``kernels`` (which a curve answers for) and of its ``around`` (quantisation, permutation, activation:
memory-bound kernels that the layer's time contains and the roofline prices).
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.calibrate.loads import alpha, busiest
from meshwright.calibrate.tables import TableRow
from meshwright.cost.points import BLOCKS, WEIGHT_ONLY, stored_dtype
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
        return self.engine or self.op in ("prefill", "decode", "latent", "expanded", "grouped_gemm")

    @property
    def flash(self) -> int:
        """The generation of FlashAttention that was measured, 0 for what the device's own generation has."""
        return 2 if self.op in ("flash_fwd", "flash_bwd") else 0


def measured(table: str, row: TableRow) -> MeasuredWork | None:
    """A row of a table as work, which a curve of its kind is fitted to; None for precisions this package does not
    compute in."""
    return _READERS[table](row)


def asked(table: str, row: TableRow) -> MeasuredWork | None:
    """A row as work that a prediction prices, whether curves are fitted to such rows or to others of the same kind:
    the products around latent attention are priced by the curves of ordinary ones."""
    return measured(table, row) or (_absorbed(row) if table == "ops_mla" else None)


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
    """One query over a compressed cache, or a prompt that expands it for every head; whole layers contain products,
    which other curves price."""
    at, text = row.number, row.text
    dtype = "fp8" if "fp8" in (text["dtype"], text["kv_dtype"]) else text["dtype"]
    if dtype not in DTYPE_BYTES or text["scope"] != "kernel":
        return None
    rank, keys, heads, turned = (int(at[name]) for name in ("kv_lora_rank", "kv_len", "heads", "qk_rope_head_dim"))
    decoded = text["phase"] == "decode"
    work = AttentionCore(
        batch=int(at["batch"]),
        q_len=1 if decoded else keys,
        kv_len=keys,
        heads=heads,
        kv_heads=1 if decoded else heads,
        head_dim=turned + (rank if decoded else int(at["qk_nope_head_dim"])),
        v_head_dim=rank if decoded else int(at["v_head_dim"]),
        pairs=float(keys) if decoded else pairs(keys, keys, causal=True, window=0),
        dtype=dtype,
    )
    op = "latent" if decoded else "expanded"
    if not work.v_head_dim or (not decoded and keys == 1):
        return None
    return MeasuredWork(op, dtype, (work,), (), at["latency_us"] * 1e-6, (work.heads,))


def _absorbed(row: TableRow) -> MeasuredWork | None:
    """The products that take a decoded query into the latent's width, and its output out of it."""
    at, text = row.number, row.text
    rank, nope, values = (int(at[name]) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    n, k = {"bmm_pre": (rank, nope), "bmm_post": (values, rank)}.get(text["scope"], (0, 0))
    if not n or not k or text["dtype"] != "bf16":
        return None
    product = Gemm(m=int(at["batch"]), n=n, k=k, batch=int(at["heads"]), dtype="bf16")
    return MeasuredWork("gemm", "bf16", (product,), (), at["latency_us"] * 1e-6, (n, k), engine=True)


#: Products of experts whose weights are stored in another format than tokens are multiplied in, as tables name them.
MIXTURES = {
    "int4_wo": ("bf16", "int4"),
    "w4a16_mxfp4": ("bf16", "mxfp4"),
    "w4a8_mxfp4_mxfp8": ("mxfp8", "mxfp4"),
}


def _moe(row: TableRow) -> MeasuredWork | None:
    dtype, weights = MIXTURES.get(row.text["dtype"], (row.text["dtype"], ""))
    at = row.number
    if dtype not in DTYPE_BYTES:
        return None
    tokens, experts, top_k, ep = (int(at[name]) for name in ("tokens", "experts", "top_k", "ep"))
    hidden, ffn = int(at["hidden"]), int(at["ffn"] // at["tp"])
    rows, active = busiest(tokens, experts, top_k, ep, alpha(row.text["distribution"]))
    mean = max(1, tokens * top_k // ep)
    up = 2 * ffn if row.text["gated"] == "True" else ffn
    common = {
        "groups": max(1, round(active)),
        "rows": mean,
        "imbalance": rows / mean,
        "dtype": dtype,
        "weights": weights,
    }
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
    kind = stored_dtype(kernels[0]) if weights else dtype
    return MeasuredWork("grouped_gemm", kind, kernels, tuple(around), at["latency_us"] * 1e-6, group)


#: Scans by chunks that training runs too, and one written for serving alone, which is another curve.
SCANS = {"chunk_gated_delta_rule": "scan", "chunk_gated_delta_rule_flashinfer": "scan_flashinfer"}
#: A decoded token's scan, whose states are in fp32 (TensorRT-LLM's kernel moves more bytes a second than memory has if
#: its are too).
STEPS = ("fused_recurrent_gated_delta_rule_packed_decode",)
CONVOLUTIONS = {"causal_conv1d_fn": "prefill", "causal_conv1d_update": "decode"}
#: Tokens that the measured scans multiply at once (fla-org/flash-linear-attention).
CHUNK = 64


def _ssm(row: TableRow) -> MeasuredWork | None:
    at, text = row.number, row.text
    kernel, phase = text["kernel"], text["phase"]
    if phase == "verify" or text["dtype"] not in DTYPE_BYTES:
        return None
    single = at["seq_len"] == 1
    if single != (phase == "decode"):  # a prompt of a single token is the step of a recurrence, not a scan by chunks
        return None
    if kernel in CONVOLUTIONS:
        return _short_convolution(row) if CONVOLUTIONS[kernel] == phase else None
    op, library = ("step", "") if kernel in STEPS else (SCANS.get(kernel), text["backend"])
    if op is None:
        return None
    scan = Scan(
        rule="delta",
        batch=int(at["batch"]),
        seq_len=int(at["seq_len"]),
        heads=int(at["num_v_heads"]),
        groups=int(at["num_k_heads"]),
        k_dim=int(at["head_k_dim"]),
        v_dim=int(at["head_v_dim"]),
        chunk=CHUNK,
    )
    group = (scan.heads, scan.groups)
    return MeasuredWork(op, text["dtype"], (scan,), (), at["latency_us"] * 1e-6, group, library, engine=True)


def _short_convolution(row: TableRow) -> MeasuredWork:
    """The convolution of a prompt, or of one token with those before it that its sequence keeps."""
    at, text = row.number, row.text
    values, keys = int(at["num_v_heads"] * at["head_v_dim"]), int(at["num_k_heads"] * at["head_k_dim"])
    maps = int(at["n_groups"] * at["d_state"]) if text["op"] == "mamba2" else keys
    work = Convolution(
        batch=int(at["batch"]),
        seq_len=int(at["seq_len"]),
        channels=values + 2 * maps,
        kernel=max(1, int(at["d_conv"])),
    )
    library = text["backend"] if text["backend"] in BLOCKS else ""
    op = "convolution_step" if work.seq_len == 1 else "convolution_blocks" if library else "convolution"
    return MeasuredWork(op, text["dtype"], (work,), (), at["latency_us"] * 1e-6, (work.channels,), library, engine=True)


_READERS = {
    "ops_ssm": _ssm,
    "ops_gemm": _gemm,
    "ops_attention": _attention,
    "ops_mla": _latent,
    "ops_moe": _moe,
}
