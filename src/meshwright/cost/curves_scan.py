"""Curves of scans by chunks, of the short convolutions before them and of the steps by which a decoded token does
both: seconds as a function of shape and hardware.

A scan by chunks (Gated DeltaNet, 2412.06464; the kernels of fla-org/flash-linear-attention) multiplies small matrices
in all chunks at once and hands a state from chunk to chunk, which is serial. A step reads and writes each sequence's
state, and follows the formula of the convolution. Priced in plain Python and compiled by ``calibrate``, like
``curves_gemm``.
"""

from __future__ import annotations

from math import ceil, log2

from meshwright.cost.curve import Constant, CurveShape

SCAN_CONSTANTS = (
    Constant("start_us", "us", "of the kernels of one scan when they do nothing", 20.0, 0.1, 100.0),
    Constant("of_peak", "fraction", "of the matrix units' peak that products of chunks reach", 0.1, 0.01, 1.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth that inputs and states stream at", 0.5, 0.02, 1.0),
    Constant("step_us", "us", "of one chunk's state, which waits for the one before", 1.0, 0.0, 20.0),
    Constant(
        "sharpness", "1", "power of the sum that joins the roofs; infinite would be their maximum", 2.0, 1.0, 20.0
    ),
)
SCAN_NODES = (
    tuple(float(i) for i in range(0, 17, 2)),
    tuple(float(i) for i in range(0, 17, 2)),
    (0.0, 1.0, 2.0),
)
CONVOLUTION_CONSTANTS = (
    Constant("start_us", "us", "from one kernel's start to the next one's when it does nothing", 2.0, 0.1, 40.0),
    Constant("of_bandwidth", "fraction", "of device memory bandwidth", 0.6, 0.02, 1.0),
    Constant(
        "sharpness",
        "1",
        "power of the sum that joins start and stream; infinite is their maximum",
        1.5,
        1.0,
        20.0,
    ),
)
CONVOLUTION_NODES = (
    tuple(float(i) for i in range(0, 23, 2)),
    tuple(float(i) for i in range(6, 17, 2)),
)


def scan(x, hw, p):
    """Seconds of ``x`` = (batch, seq_len, heads, groups, k_dim, v_dim, chunk, flops, bytes)."""
    chunks = ceil(x[1] / x[6])
    waves = ceil(x[0] * x[2] / hw[0])
    compute = x[7] / (hw[0] * hw[1] * p[1])
    moved = x[8] / (hw[2] * p[2])
    serial = chunks * waves * p[3] * 1e-6
    return p[0] * 1e-6 + (compute ** p[4] + moved ** p[4] + serial ** p[4]) ** (1.0 / p[4])


def scan_axes(x):
    """Coordinates of the residual: powers of two of tokens, sequences x heads, heads that share keys."""
    return log2(x[1]), log2(x[0] * x[2]), log2(x[2] / x[3])


def convolution(x, hw, p):
    """Seconds of ``x`` = (tokens, channels, bytes), or of a step of (sequences, heads, bytes)."""
    moved = x[2] / (hw[2] * p[1])
    return ((p[0] * 1e-6) ** p[2] + moved ** p[2]) ** (1.0 / p[2])


def convolution_axes(x):
    """Coordinates of the residual: powers of two of tokens and channels, or of sequences and heads."""
    return log2(x[0]), log2(x[1])


def persistent(x, hw, p):
    """Seconds of ``x`` as of :func:`scan`, of a kernel whose blocks keep a head's state on their multiprocessor and go
    through all of its chunks: heads beyond the multiprocessors wait for their turn."""
    waves = ceil(x[0] * x[2] / hw[0])
    return (p[0] + waves * (p[1] + ceil(x[1] / x[6]) * p[2])) * 1e-6


def blocks(x, hw, p):
    """Seconds of ``x`` = (tokens, channels, bytes, sequences) of a kernel that gives every channel of every sequence to
    a block of threads, however short the sequence is."""
    moved = x[2] / (hw[2] * p[1])
    issued = x[3] * x[1] * p[3] * 1e-6 / hw[0]
    return p[0] * 1e-6 + (moved ** p[2] + issued ** p[2]) ** (1.0 / p[2])


_SCAN_AXES = ("tokens", "batch*heads", "heads per key head")
SCAN = CurveShape("scan", scan, scan_axes, _SCAN_AXES, SCAN_CONSTANTS, SCAN_NODES)
CONVOLUTION = CurveShape(
    "convolution", convolution, convolution_axes, ("tokens", "channels"), CONVOLUTION_CONSTANTS, CONVOLUTION_NODES
)
PERSISTENT_CONSTANTS = (
    SCAN_CONSTANTS[0],
    Constant("block_us", "us", "of a head that begins on a multiprocessor", 5.0, 0.0, 100.0),
    Constant("step_us", "us", "of one chunk of a head", 3.0, 0.01, 50.0),
)
PERSISTENT = CurveShape("persistent", persistent, scan_axes, _SCAN_AXES, PERSISTENT_CONSTANTS, SCAN_NODES)
STEP_NODES = (tuple(float(i) for i in range(11)), tuple(float(i) for i in range(9)))
#: One token of each sequence: its state is read and written.
STEP = CurveShape("step", convolution, convolution_axes, ("sequences", "heads"), CONVOLUTION_CONSTANTS, STEP_NODES)
CONVOLUTION_STEP = CurveShape(
    "convolution_step",
    convolution,
    convolution_axes,
    ("sequences", "channels"),
    CONVOLUTION_CONSTANTS,
    (STEP_NODES[0], CONVOLUTION_NODES[1]),
)
BLOCK_CONSTANTS = (
    *CONVOLUTION_CONSTANTS,
    Constant("block_us", "us", "of one block of threads on a multiprocessor when it does nothing", 0.1, 0.001, 10.0),
)
CONVOLUTION_BLOCKS = CurveShape(
    "convolution_blocks", blocks, convolution_axes, ("tokens", "channels"), BLOCK_CONSTANTS, CONVOLUTION_NODES
)
