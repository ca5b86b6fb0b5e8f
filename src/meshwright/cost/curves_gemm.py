"""Curves of matrix products: seconds as a function of shape and hardware with a few physical constants.

Tile and wave quantisation as NVIDIA's matrix multiplication guide describes them, the two roofs of Williams et
al. (2009), split k for small outputs, and the clock that falls under sustained load. The same function is priced
here in plain Python and compiled by ``calibrate`` to fit it, so it calls nothing of this package.
"""

from __future__ import annotations

from math import ceil, inf, log2

from meshwright.cost.curve import Constant, CurveShape

#: Output tiles of one thread block (CUTLASS and cuBLAS), rows by columns; the library takes the fastest.
TILES = (
    (256.0, 128.0), (128.0, 256.0), (256.0, 256.0), (128.0, 128.0), (128.0, 64.0),
    (64.0, 128.0), (64.0, 64.0), (32.0, 32.0), (64.0, 256.0), (16.0, 128.0),
)  # fmt: skip
#: Products above this many FLOP run long enough for the power limit to lower the clock.
SUSTAINED_FLOPS = 1e11
#: Where a curve's residual is tabulated when its table spans it, in powers of two of its coordinates.
GEMM_NODES = (
    tuple(float(i) for i in range(0, 18, 2)),
    tuple(float(i) for i in range(5, 18, 2)),
    tuple(float(i) for i in range(5, 18, 2)),
    (0.0, 6.0, 12.0),
)
GROUPED_NODES = (
    tuple(float(i) for i in range(18)),
    tuple(float(i) for i in range(0, 10, 2)),
    tuple(float(i) for i in range(16, 30, 2)),
)

GEMM_CONSTANTS = (
    Constant("start_us", "us", "from one kernel's start to the next one's when it does nothing", 2.0, 0.1, 40.0),
    Constant("of_peak", "fraction", "of the matrix units' peak that a full wave of tiles reaches", 0.85, 0.05, 1.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that operands stream at", 0.8, 0.1, 1.0),
    Constant("wave_us", "us", "prologue and epilogue of one wave of tiles", 1.0, 0.0, 5.0),
    Constant("split_us", "us", "the second kernel of a product whose k is split", 2.0, 0.0, 40.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the two roofs; infinite would be their maximum", 4.0, 2.0, 20.0
    ),
    Constant("derate", "1", "power of FLOP above 1e11 by which the sustained clock lowers the rate", 0.02, 0.0, 0.2),
    Constant("of_l2", "fraction", "of the L2's bandwidth that operands of a tile stream at", 1.0, 0.1, 10.0),
    Constant("split_traffic", "times", "float32 partial sums written and read per split", 1.0, 0.0, 10.0),
)

GROUPED_CONSTANTS = (
    Constant("start_us", "us", "from one kernel's start to the next one's when it does nothing", 6.0, 0.1, 60.0),
    Constant("of_peak", "fraction", "of the matrix units' peak that a full wave of tiles reaches", 0.8, 0.05, 1.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that weights and tokens stream at", 0.8, 0.1, 1.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the two roofs; infinite would be their maximum", 3.0, 1.0, 20.0
    ),
    Constant("wave_us", "us", "prologue and epilogue of one wave of tiles", 1.0, 0.0, 5.0),
    Constant(
        "reread_rows",
        "rows",
        "of one expert after which its weights are read again, if L2 does not hold them",
        512.0,
        8.0,
        1e5,
    ),
    Constant("l2_share", "fraction", "of the L2 that an expert's weights may fill", 0.6, 0.02, 10.0),
    Constant("of_l2", "fraction", "of the L2's bandwidth that operands of a tile stream at", 1.0, 0.1, 10.0),
)


def gemm(x, hw, p):
    """Seconds of ``x`` = (m, n, k, batch, operand bytes, output bytes, bytes of a weight in memory) on ``hw``
    (``curve.hardware``)."""
    m, n, k, batch, element, out_bytes = x[0], x[1], x[2], x[3], x[4], x[5]
    sms, bandwidth = hw[0], hw[2] * p[2]
    rate = hw[1] * p[1]
    flops = 2.0 * batch * m * n * k
    if flops > SUSTAINED_FLOPS:
        rate *= (flops / SUSTAINED_FLOPS) ** -p[6]
    l2 = hw[3] * p[7]
    wave, best = p[3] * 1e-6, inf
    for tile in TILES:
        tm, tn = tile[0], tile[1]
        tiles = batch * ceil(m / tm) * ceil(n / tn)
        step, fed = 2.0 * tm * tn / rate, (tm + tn) * element / l2
        if fed > step:
            step = fed
        seconds = ceil(tiles / sms) * (k * step + wave)
        if seconds < best:
            best = seconds
        split = 2.0
        while tiles * split < 2.0 * sms and k >= 128.0 * split and split <= 16.0:
            seconds = ceil(tiles * split / sms) * (ceil(k / split) * step + wave)
            seconds += p[4] * 1e-6 + split * batch * m * n * 4.0 / bandwidth * p[8]
            if seconds < best:
                best = seconds
            split *= 2.0
    moved = batch * (element * m * k + x[6] * k * n + out_bytes * m * n) / bandwidth
    return p[0] * 1e-6 + (best ** p[5] + moved ** p[5]) ** (1.0 / p[5])


def gemm_axes(x):
    """Coordinates of the residual: powers of two of m, n, k, batch."""
    return log2(x[0]), log2(x[1]), log2(x[2]), log2(x[3])


def grouped(x, hw, p):
    """Seconds of ``x`` = (rows, groups with rows, n, k, weight bytes, token bytes): equal groups in one kernel."""
    rows, groups, n, k, weight_bytes, token_bytes = x[0], x[1], x[2], x[3], x[4], x[5]
    sms, bandwidth = hw[0], hw[2] * p[2]
    rate, l2 = hw[1] * p[1], hw[3] * p[7]
    each = rows / groups
    best = inf
    for i in range(4):
        tm = 16.0 * 2.0**i
        # The matrix instruction is 64 rows high: a lower tile leaves the rest of it idle.
        step = max(2.0 * max(tm, 64.0) * 128.0 / rate, (tm + 128.0) * token_bytes / l2)
        waves = max(1.0, groups * ceil(each / tm) * ceil(n / 128.0) / sms)
        best = min(best, waves * (k * step + p[4] * 1e-6))
    weights = n * k * weight_bytes
    again = max(0.0, 1.0 - hw[4] * p[6] / weights) * max(0.0, each / p[5] - 1.0)
    moved = (groups * weights * (1.0 + again) + rows * (k * token_bytes + n * 2.0)) / bandwidth
    return p[0] * 1e-6 + (best ** p[3] + moved ** p[3]) ** (1.0 / p[3])


def grouped_axes(x):
    """Coordinates of the residual: powers of two of rows of one group, groups, and weights of one group."""
    return log2(x[0] / x[1]), log2(x[1]), log2(x[2] * x[3])


GEMM = CurveShape("gemm", gemm, gemm_axes, ("m", "n", "k", "batch"), GEMM_CONSTANTS, GEMM_NODES)
GROUPED = CurveShape(
    "grouped_gemm", grouped, grouped_axes, ("rows of a group", "groups", "n*k"), GROUPED_CONSTANTS, GROUPED_NODES
)
