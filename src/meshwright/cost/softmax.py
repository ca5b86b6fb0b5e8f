"""Softmax of stored scores where a framework's fused kernel does not take their shape.

Megatron-LM's kernel scales, masks and normalises in one pass. It is not there for every shape, and PyTorch's operators
run instead, in fp32 (``FusedScaleMaskSoftmax``: ``is_kernel_available`` and ``forward_torch_softmax`` of
megatron/model/fused_softmax.py, NVIDIA/Megatron-LM; its forks have it too). With few heads on a rank, as under a large
tensor-parallel degree, small microbatches do without the kernel.
"""

from __future__ import annotations

from math import gcd

import msgspec

from meshwright.work import Elementwise, Scores

#: The kernel takes matrices of scores four at a time, and rows of a multiple of four keys, more than 16 of them.
BLOCK, FEWEST_KEYS = 4, 16
#: Bytes of a score that the fused kernel reads and writes in 16 bits: forward, and backward (gradient, probability).
FUSED_BYTES = (2 + 2, 2 + 2 + 2)
#: The same of PyTorch's operators, in their order. Forward: to fp32, times the scale, masked, softmax, to 16 bits.
#: Backward: to fp32, gradient of the softmax (of two operands), masked, times the scale, to 16 bits.
APART_BYTES = ((2 + 4, 4 + 4, 4 + 4, 4 + 4, 4 + 2), (2 + 4, 4 + 4 + 4, 4 + 4, 4 + 4, 4 + 2))


def fuses(scores: Scores, longest: int) -> bool:
    """Return whether the fused kernel takes scores of at most `longest` keys a row."""
    whole = scores.batch % BLOCK == 0 and scores.queries % BLOCK == 0 and scores.keys % BLOCK == 0
    return whole and FEWEST_KEYS < scores.keys <= longest


def rows_for_fused(batch: int) -> int:
    """Return how many times as many rows a microbatch of so many matrices of scores needs for the fused kernel."""
    return BLOCK // gcd(batch, BLOCK)


def softmax_apart(work: Elementwise, longest: int) -> Elementwise:
    """Return kernels that hold a softmax as they run where the fused one takes scores of at most `longest` keys a row:
    as they are, or with PyTorch's operators in its place. Masks are read once for all heads, and not counted."""
    scores = work.scores
    if scores is None or fuses(scores, longest):
        return work
    apart, fused = APART_BYTES[scores.backward], FUSED_BYTES[scores.backward]
    count = float(scores.batch) * scores.queries * scores.keys
    return msgspec.structs.replace(
        work,
        num_bytes=work.num_bytes + count * (sum(apart) - fused),
        kernels=work.kernels + len(apart) - 1,
        scores=None,
    )
