"""Work items as fitted curves see them: which kinds of curves may answer for one, and at which point.

What an engine runs may be another kernel than what training runs for the same work, or another engine's.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright.spec.hardware import Device
from meshwright.spec.workload import DTYPE_BYTES, WEIGHT_BYTES
from meshwright.work import AttentionCore, Convolution, Gemm, GroupedGemm, Scan, Work, weight_bytes

#: Tables' name for products whose weights alone are stored in so few bits ("weights only").
WEIGHT_ONLY = "_wo"
#: Engines that scan prompts of the gated delta rule by FlashInfer's kernel (vLLM 0.24's, as their tables name it).
FLASHINFER = ("vllm",)
#: Experts' products of weights in mxfp4 and tokens in mxfp8, one kernel of Blackwell's (TensorRT-LLM's, which vLLM and
#: SGLang run by FlashInfer). It reads memory twice as fast as the table's kernel for nvfp4 where few tokens come to an
#: expert; engines choose the faster one of theirs by trying.
MIXED = "mxfp8_mxfp4"
#: Products of 16 bits that read four-bit weights, by one kernel (MARLIN) whose format of scales is a parameter: engines
#: run it for mxfp4 where their own kernel for that is slower.
MARLIN = "int4_wo"
#: Engines whose attention on Hopper is FlashAttention 3, of caches in 8 bits too (vLLM's FLASH_ATTN, SGLang's fa3).
FLASH_3 = ("vllm", "sglang")
#: What a token's attention takes there for every key of a cache in 16 bits over one in 8 bits: casts and transposes of
#: values inside the kernel leave little of the half that is read (vllm-project/flash-attention#96, head dimension 128
#: on H100: 1.39 times, and not faster at all before; TensorRT-LLM's kernel, which the tables are of, reaches 2).
FLASH_3_EIGHT_BITS = 1.39
#: Engines whose convolution of prompts gives every channel of every sequence to a block of threads.
BLOCKS = ("trtllm",)


class Points(NamedTuple):
    """A work item as a curve sees it: which kinds of curves may answer, in order, at which point. Where none is of
    exactly its precision, those of another one (``like``) may; ``instead`` are other kernels that would compute it."""

    ops: tuple[str, ...]
    x: tuple[float, ...]
    dtype: str
    like: str = ""
    instead: tuple[Points, ...] = ()


def weight_only(stored: str) -> str:
    """Return the name of the precision of products that read weights of a format and multiply in 16 bits."""
    return stored + WEIGHT_ONLY


def point(work: Work, *, serving: bool = False, ops: tuple[str, ...] = (), library: str = "") -> Points | None:
    """The point of a work item, or None for what has no curve. `ops` are the curves for an attention core that is
    not decoding; while serving, new keys and values also go to the cache, and the engine may have scans of its own."""
    if isinstance(work, Gemm):
        element = DTYPE_BYTES[work.dtype]
        out = work.out_bytes * (2 if work.accumulate else 1)
        # curves count all of A as read: what an implicit product leaves out is taken off its results
        out -= element * work.k * (1.0 - work.read) / work.n
        x = (work.m, work.n, work.k, work.batch, element, out, weight_bytes(work))
        return Points(("gemm",), x, weight_only(work.weights) if work.weights else work.dtype)
    if isinstance(work, GroupedGemm):
        return _grouped(work, serving)
    if isinstance(work, AttentionCore):
        return _attention(work, serving, ops)
    if isinstance(work, Scan | Convolution):
        return _scan(work, library if serving else "")
    return None


def flash_3(work: Work, device: Device, library: str) -> Work:
    """Return a core that decodes behind a cache in 8 bits as the kernel in 16 bits that takes as long, where an engine
    runs FlashAttention 3 for it: with as many fewer keys as these are faster. Any other work is returned as it is."""
    if library not in FLASH_3 or device.architecture != "Hopper" or not isinstance(work, AttentionCore):
        return work
    if work.q_len > 1 or work.head_dim != work.v_head_dim or DTYPE_BYTES[work.dtype] != 1.0:
        return work
    keys, pairs = max(1, round(work.kv_len / FLASH_3_EIGHT_BITS)), work.pairs / FLASH_3_EIGHT_BITS
    return msgspec.structs.replace(work, dtype="bf16", kv_len=keys, pairs=pairs)


def _scan(work: Scan | Convolution, library: str) -> Points | None:
    """Scans by chunks, convolutions, and steps of one token, which read and write a state of fp32 whatever the rule is.

    Nobody's table has scans of Mamba-2: they have the curve of the delta rule's in Triton, for operations and bytes of
    their own. FlashInfer's kernel is of the delta rule alone."""
    if isinstance(work, Convolution):
        x = (work.batch * work.seq_len, work.channels, work.num_bytes)
        if library in BLOCKS and work.seq_len > 1:
            return Points(("convolution_blocks",), (*x, work.batch), "bf16")
        return Points(("convolution_step" if work.seq_len == 1 else "convolution",), x, "bf16")
    if work.rule == "selective":
        return None
    if work.seq_len == 1:
        return Points(("step",), (work.batch, work.heads, work.num_bytes), "bf16")
    sizes = (work.batch, work.seq_len, work.heads, work.groups, work.k_dim, work.v_dim, work.chunk)
    op = "scan_flashinfer" if library in FLASHINFER and work.rule == "delta" else "scan"
    return Points((op,), (*sizes, work.flops, work.num_bytes), "bf16")


def _grouped(work: GroupedGemm, serving: bool) -> Points:
    """One kernel where engines serve; in training a product of each expert, which is what Transformer Engine's
    grouped layers issue (the A100's table is of a serving kernel that reads the weights again for every few
    rows, and reaches a fifth of what its products do)."""
    rows = max(1.0, work.rows * work.imbalance)
    groups = min(float(work.groups), rows)
    element = DTYPE_BYTES[work.dtype]
    each = max(1.0, rows / groups)
    if work.weight_gradient:
        # One product [k, rows] x [rows, n] per expert: batched, with the rows as its inner dimension.
        return Points(("gemm",), (work.k, work.n, each, groups, element, work.out_bytes, element), work.dtype)
    if not serving:
        return Points(("gemm",), (each, work.n, work.k, groups, element, work.out_bytes, element), work.dtype)
    size, op = (rows, groups, work.n, work.k), ("grouped_gemm",)
    own = Points(op, (*size, weight_bytes(work), element), work.dtype)
    if work.weights:
        own = own._replace(dtype=stored_dtype(work), like=work.dtype)
    elif work.dtype != "nvfp4":
        return own
    others = {MIXED: (WEIGHT_BYTES["mxfp4"], 1.0)} if "mxfp4" in work.weights or not work.weights else {}
    others |= {MARLIN: own.x[4:]} if own.dtype == weight_only("mxfp4") else {}
    return own._replace(instead=tuple(Points(op, (*size, *read), dtype) for dtype, read in others.items()))


def stored_dtype(work: GroupedGemm) -> str:
    """Return the name of the precision of experts' products whose weights are stored in another format."""
    return weight_only(work.weights) if DTYPE_BYTES[work.dtype] == 2.0 else f"{work.dtype}_{work.weights}"


def _attention(work: AttentionCore, serving: bool, ops: tuple[str, ...]) -> Points | None:
    dtype = work.dtype if work.dtype in ("fp16", "fp32") else "fp8" if DTYPE_BYTES[work.dtype] < 2 else "bf16"
    element = DTYPE_BYTES[dtype]
    if dtype == "fp32":
        return None
    if work.q_len == 1 and work.kv_len > 1 and not work.backward:
        if work.head_dim != work.v_head_dim:  # a compressed cache is read once for all heads: another kernel
            x = (work.batch, work.pairs, work.heads, work.head_dim, work.v_head_dim, element)
            return Points(("latent",), x, dtype) if work.kv_heads == 1 else None
        x = (work.batch, work.kv_len, work.heads, work.kv_heads, work.head_dim, work.pairs, element, 1.0)
        return Points(("decode",), x, dtype)
    if serving and work.head_dim != work.v_head_dim and not work.backward:  # prompts of latent attention
        ops = ("expanded", "prefill")
    width = (work.head_dim + work.v_head_dim) / 2
    products, passes = 5.0 if work.backward else 2.0, 2.0 if serving else 1.0
    x = (work.batch, work.q_len, work.kv_len, work.heads, work.kv_heads, width, work.pairs, element, products, passes)
    return Points(ops, x, dtype)
