"""Curves of fused attention: seconds as a function of shape and hardware with a few physical constants.

Forward and backward: blocks of queries over the multiprocessors, matrix products and exponentials in turn
(FlashAttention-2, Dao 2307.08691; the exponentials' share as in FlashAttention-3, 2407.08608), tensors streamed
through memory. One query over a cache: one block per sequence and key-value head, keys split when blocks are few
(Flash-Decoding, Dao et al., 2023). One query over a compressed cache: all heads of a sequence read its latent once and
multiply it twice (DeepSeek-V2, 2405.04434, section 2.1.2). Priced in plain Python and compiled by ``calibrate``, like
``curves_gemm``.
"""

from __future__ import annotations

from math import ceil, log2

from meshwright.cost.curve import Constant, CurveShape

#: Past this many query heads per key-value head the fused decode kernel gives each query head its own block
#: (measured for TensorRT-LLM 1.3 on H100: 32 heads per key-value head take 11 us, 48 take 83 us).
SHARED_HEADS = 32.0

FORWARD_CONSTANTS = (
    Constant("start_us", "us", "from one operation's start to the next one's when it does nothing", 8.0, 0.1, 200.0),
    Constant("of_peak", "fraction", "of the matrix units' peak that products reach", 0.7, 0.02, 1.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that the tensors stream at", 0.5, 0.02, 1.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the two roofs; infinite would be their maximum", 2.0, 1.0, 20.0
    ),
    Constant("exponentials", "times", "of the exponentials' own time that products do not hide", 1.0, 0.0, 4.0),
    Constant(
        "waste_keys", "keys", "per query, computed in the blocks on the mask's edge and thrown away", 64.0, 0.0, 1000.0
    ),
    Constant(
        "last_wave", "fraction", "of the last wave's idle multiprocessors that no other work fills", 0.5, 0.0, 1.0
    ),
    Constant("block", "queries", "of one block", 128.0, 32.0, 256.0),
)
FORWARD_NODES = (
    tuple(float(i) for i in range(0, 16, 2)),
    (0.0, 4.0, 7.0, 10.0, 13.0),
    tuple(float(i) for i in range(0, 16, 2)),
    (5.0, 6.0, 7.0, 8.0),
)
DECODE_CONSTANTS = (
    Constant("start_us", "us", "from one operation's start to the next one's when it does nothing", 6.0, 0.1, 60.0),
    Constant("block_us", "us", "of one block before and after its keys", 4.0, 0.0, 40.0),
    Constant(
        "of_share", "fraction", "of a multiprocessor's share of memory bandwidth that one block reaches", 2.0, 0.1, 4.0
    ),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that keys and values stream at", 0.9, 0.1, 1.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the two roofs; infinite would be their maximum", 3.0, 1.0, 20.0
    ),
    Constant("chunk", "keys", "of one block at least when keys are split", 256.0, 16.0, 4096.0),
    Constant("combine_us", "us", "to join the blocks of split keys", 3.0, 0.0, 40.0),
    Constant("per_width", "1", "growth of a block's own time per 128 of head dimension", 0.3, 0.0, 4.0),
    Constant("per_heads", "1", "growth of a block's own time per 8 query heads that share it", 0.3, 0.0, 4.0),
)
DECODE_NODES = (
    (0.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0),
    tuple(float(i) for i in range(0, 20, 3)),
    (-2.0, -1.0, 0.0, 1.0, 3.0, 5.0),
    (6.0, 7.0, 8.0),
)
LATENT_CONSTANTS = (
    Constant("start_us", "us", "from one operation's start to the next one's when it does nothing", 12.0, 0.1, 60.0),
    Constant("of_peak", "fraction", "of the matrix units' peak that products reach", 0.5, 0.02, 1.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that the latents stream at", 0.8, 0.1, 1.0),
    Constant("of_share", "fraction", "of a multiprocessor's share of memory bandwidth that one reaches", 1.0, 0.1, 4.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the two roofs; infinite would be their maximum", 2.0, 1.0, 20.0
    ),
    Constant("heads", "heads", "that are multiplied at once at least", 64.0, 1.0, 128.0),
    Constant("chunk", "keys", "of one multiprocessor at least when keys are split", 128.0, 16.0, 4096.0),
)
LATENT_NODES = (
    (0.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0),
    tuple(float(i) for i in range(0, 12, 2)),
    (0.0, 2.0, 4.0, 5.0, 6.0, 7.0),
)


def forward(x, hw, p):
    """Seconds of ``x`` = (batch, q_len, kv_len, heads, kv_heads, width, pairs, bytes per element, products per
    pair: 2 forward, 5 backward; passes over the tensors: 1, 2 when new keys also go to a cache)."""
    batch, q, kv, heads, kv_heads, width, pairs, element, products = (
        x[0],
        x[1],
        x[2],
        x[3],
        x[4],
        x[5],
        x[6],
        x[7],
        x[8],
    )
    blocks = batch * heads * ceil(q / p[7])
    # Kernels exist for head dimensions of whole 32s; what is missing is padded.
    per_pair = 2.0 * products * (32.0 * ceil(width / 32.0) + p[4] * hw[5])
    block_s = (pairs / q + p[5]) * p[7] * per_pair / (hw[1] * p[1])
    waves = blocks / hw[0]
    waves = 1.0 if waves < 1.0 else waves + (ceil(waves) - waves) * p[6]
    compute = waves * block_s
    moved = batch * element * width * (2.0 * q * heads + 2.0 * min(kv, pairs) * kv_heads) * x[9] * products / 2.0
    moved /= hw[2] * p[2]
    return p[0] * 1e-6 + (compute ** p[3] + moved ** p[3]) ** (1.0 / p[3])


def forward_axes(x):
    """Coordinates of the residual: powers of two of queries, keys per query, batch x heads, head dimension."""
    return log2(x[1]), log2(x[6] / x[1]), log2(x[0] * x[3]), log2(x[5])


def decode(x, hw, p):
    """Seconds of ``x`` = (batch, kv_len, heads, kv_heads, width, pairs, bytes per element of the cache, 1 if
    ``SHARED_HEADS`` bounds the sharing)."""
    batch, kv, heads, kv_heads, width, pairs, element = x[0], x[1], x[2], x[3], x[4], x[5], x[6]
    keys = min(kv, pairs)
    shared = heads / kv_heads
    units = batch * kv_heads
    if shared > SHARED_HEADS and x[7] > 0.0:
        shared, units = 1.0, batch * heads
    splits = 1.0
    if units < hw[0]:
        splits = max(1.0, min(ceil(hw[0] / units), ceil(kv / p[5])))
    block_s = p[1] * 1e-6 * (1.0 + p[7] * width / 128.0 + p[8] * shared / 8.0)
    streamed = 2.0 * keys / splits * width * element / (hw[2] / hw[0] * p[2])
    serial = max(1.0, units * splits / hw[0]) * (block_s + streamed)
    moved = batch * width * (2.0 * keys * kv_heads * element + 4.0 * heads) / (hw[2] * p[3])
    seconds = p[0] * 1e-6 + (serial ** p[4] + moved ** p[4]) ** (1.0 / p[4])
    return seconds + p[6] * 1e-6 if splits > 1.0 else seconds


def decode_axes(x):
    """Coordinates of the residual: powers of two of keys, blocks, query heads per block (-2: not shared), head
    dimension."""
    shared = x[2] / x[3]
    if shared > SHARED_HEADS and x[7] > 0.0:
        return log2(x[5]), log2(x[0] * x[2]), -2.0, log2(x[4])
    return log2(x[5]), log2(x[0] * x[3]), log2(shared), log2(x[4])


def latent(x, hw, p):
    """Seconds of ``x`` = (batch, pairs, heads, width of the latent with its positions, width of the values in it, bytes
    per element of the cache)."""
    batch, keys, heads, width, values, element = x[0], x[1], x[2], x[3], x[4], x[5]
    used = min(hw[0], batch * ceil(keys / p[6])) / hw[0]
    flops = 2.0 * batch * p[5] * ceil(heads / p[5]) * keys * (width + values)
    compute = flops / (hw[0] * hw[1] * p[1] * used)
    moved = batch * (keys * width * element + 2.0 * heads * (width + values)) / (hw[2] * min(p[2], used * p[3]))
    return p[0] * 1e-6 + (compute ** p[4] + moved ** p[4]) ** (1.0 / p[4])


def latent_axes(x):
    """Coordinates of the residual: powers of two of keys, sequences, heads."""
    return log2(x[1]), log2(x[0]), log2(x[2])


_FORWARD_AXES = ("queries", "keys per query", "batch*heads", "head dim")
FORWARD = CurveShape("attention", forward, forward_axes, _FORWARD_AXES, FORWARD_CONSTANTS, FORWARD_NODES)
DECODE = CurveShape(
    "decode", decode, decode_axes, ("keys", "blocks", "shared", "head dim"), DECODE_CONSTANTS, DECODE_NODES
)
LATENT = CurveShape("latent", latent, latent_axes, ("keys", "sequences", "heads"), LATENT_CONSTANTS, LATENT_NODES)
