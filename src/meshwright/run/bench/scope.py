"""Scope: which sizes the micro-benchmarks of this machine go through, and when they have been repeated enough.

Sizes are spaced evenly in their logarithm, so that a line between the logarithms of neighbours is near what lies
between them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TimedLayer(NamedTuple):
    """A small model whose passes are timed: `gated` is Llama's shape, else GPT's."""

    hidden: int
    ffn: int
    heads: int
    gated: bool
    seq: int
    microbatch: int
    layers: int


def _powers(base: float, first: int, last: int) -> tuple[float, ...]:
    return tuple(base**e for e in range(first, last + 1))


class BenchScope(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and repeats of a measurement. ``gemm_m``: rows of products, ``gemm_nk``: their columns and depths.
    ``attention``: batch times heads, tokens, head widths. ``elementwise``, ``collective_bytes``, ``staged_bytes``:
    bytes. ``elements``: of the tensor that a memory-bound operator reads; its instances have ``together`` elements, at
    least where that takes no more than ``most_instances`` of them.

    Everything is gone through ``rounds`` times, and up to ``most_rounds`` times what then spreads by more than
    ``spread`` (the range of its repeats over their median). A repeat lasts ``span_s`` seconds: a core computes faster
    for the first milliseconds after a rest than it can go on, by up to a tenth. No round beyond ``rounds`` begins later
    than ``patience_s`` after the first. ``exchange_calls``: of a repeat of a small and of a large exchange.
    ``pool_bytes``: memory that operands go through on a processor before any is used again. A product of more than
    ``largest_flops`` operations and a core of more than ``largest_scores`` scores say nothing new: a part is timed."""

    name: str
    gemm_m: tuple[float, ...]
    gemm_nk: tuple[float, ...]
    attention: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    elementwise: tuple[float, ...]
    elements: tuple[int, ...]
    together: int
    most_instances: int
    layers: tuple[TimedLayer, ...]
    collective_bytes: tuple[float, ...]
    staged_bytes: tuple[float, ...]
    rounds: int
    most_rounds: int
    spread: float
    span_s: float
    patience_s: float
    pool_bytes: int
    largest_flops: float
    largest_scores: float
    exchange_repeats: int
    exchange_calls: tuple[int, int]
    staged_repeats: int


#: Products are dense where models of a laptop's size lie, with some that are no powers of two, which fill vector
#: registers otherwise (a line from power to power is up to a tenth too high there). Layers: from many thin ones to few
#: wide ones, so that what a layer costs the host and what a pass costs it differ.
FULL = BenchScope(
    name="full",
    gemm_m=(64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0),
    gemm_nk=(64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0),
    attention=((4.0, 8.0, 16.0, 64.0), (32.0, 128.0, 256.0, 512.0, 2048.0), (16.0, 32.0, 64.0, 128.0)),
    elementwise=_powers(4.0, 5, 13),
    elements=tuple(4**e for e in range(6, 12)),
    together=1 << 23,
    most_instances=128,
    layers=(
        TimedLayer(64, 176, 4, True, 64, 1, 8),
        TimedLayer(64, 176, 4, True, 64, 1, 1),
        TimedLayer(128, 344, 4, True, 128, 1, 4),
        TimedLayer(128, 512, 4, False, 64, 2, 8),
        TimedLayer(256, 688, 4, True, 128, 2, 4),
        TimedLayer(256, 704, 8, True, 64, 2, 1),
        TimedLayer(256, 1024, 8, False, 256, 1, 2),
        TimedLayer(384, 1024, 6, True, 256, 2, 2),
        TimedLayer(512, 2048, 8, False, 256, 2, 1),
    ),
    collective_bytes=_powers(4.0, 4, 12),
    staged_bytes=_powers(4.0, 7, 13),
    rounds=5,
    most_rounds=5,
    spread=0.0,
    span_s=25e-3,
    patience_s=0.0,
    pool_bytes=128 << 20,
    largest_flops=1e9,
    largest_scores=5e6,
    exchange_repeats=5,
    exchange_calls=(10, 4),
    staged_repeats=12,
)

#: For a first plan within a minute: what a small model on a few processes needs. Operands and models are larger than a
#: core's own cache here too: in it a residual took half of what it takes in a step, and models that fit there pull the
#: host's constants below those of models that do not.
QUICK = BenchScope(
    name="quick",
    gemm_m=(64.0, 256.0, 1024.0),
    gemm_nk=(64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0),
    attention=((4.0, 16.0, 64.0), (32.0, 128.0, 512.0), (32.0, 64.0)),
    elementwise=_powers(4.0, 5, 12),
    elements=tuple(4**e for e in range(6, 11)),
    together=1 << 23,
    most_instances=128,
    layers=(
        TimedLayer(64, 176, 4, True, 64, 1, 8),
        TimedLayer(128, 344, 4, True, 128, 1, 4),
        TimedLayer(128, 512, 4, False, 64, 2, 8),
        TimedLayer(256, 688, 4, True, 128, 2, 4),
        TimedLayer(256, 704, 8, True, 128, 4, 2),
        TimedLayer(256, 1024, 8, False, 256, 1, 2),
    ),
    collective_bytes=(256.0, 4096.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0),
    staged_bytes=_powers(8.0, 5, 8),
    rounds=2,
    most_rounds=4,
    spread=0.05,
    span_s=8e-3,
    patience_s=15.0,
    pool_bytes=32 << 20,
    largest_flops=1e9,
    largest_scores=5e6,
    exchange_repeats=3,
    exchange_calls=(6, 3),
    staged_repeats=6,
)

#: On a GPU: products and attention of models of billions of parameters, and models whose passes range from those that
#: issuing kernels bounds to those that the kernels do.
FULL_GPU = msgspec.structs.replace(
    FULL,
    gemm_m=(16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0),
    gemm_nk=(256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 14336.0),
    attention=((8.0, 32.0, 128.0), (256.0, 1024.0, 2048.0, 4096.0, 8192.0), (64.0, 128.0)),
    elementwise=_powers(4.0, 5, 15),
    elements=tuple(4**e for e in range(8, 15)),
    most_instances=32,
    layers=(
        TimedLayer(256, 688, 4, True, 256, 2, 4),
        TimedLayer(512, 2048, 8, False, 512, 2, 4),
        TimedLayer(1024, 2816, 16, True, 1024, 1, 8),
        TimedLayer(1024, 4096, 16, False, 1024, 4, 2),
        TimedLayer(2048, 5632, 16, True, 2048, 2, 4),
        TimedLayer(4096, 14336, 32, True, 2048, 1, 2),
        TimedLayer(4096, 14336, 32, True, 4096, 1, 3),
    ),
    collective_bytes=_powers(4.0, 4, 14),
    rounds=2,
    most_rounds=2,
    span_s=10e-3,
    largest_flops=1e12,
    largest_scores=4e9,
)
#: The same, coarser: within two minutes.
QUICK_GPU = msgspec.structs.replace(
    FULL_GPU,
    name="quick",
    gemm_m=(64.0, 1024.0, 4096.0, 16384.0),
    gemm_nk=(512.0, 1024.0, 4096.0, 14336.0),
    attention=((8.0, 32.0), (512.0, 2048.0, 8192.0), (64.0, 128.0)),
    elements=tuple(4**e for e in range(8, 15, 2)),
    layers=(
        TimedLayer(256, 688, 4, True, 256, 2, 4),
        TimedLayer(1024, 2816, 16, True, 1024, 1, 4),
        TimedLayer(2048, 5632, 16, True, 2048, 2, 2),
        TimedLayer(4096, 14336, 32, True, 2048, 1, 2),
    ),
    collective_bytes=_powers(16.0, 2, 7),
    rounds=2,
    most_rounds=2,
    span_s=5e-3,
    exchange_repeats=3,
    exchange_calls=(6, 3),
)
_ON_GPU = {FULL.name: FULL_GPU, QUICK.name: QUICK_GPU}


def on_kind(scope: BenchScope, kind: str) -> BenchScope:
    """Return the scope of this name for a ``cpu`` or ``cuda`` device; one of one's own is as good on both."""
    known = scope in (FULL, QUICK)
    return _ON_GPU[scope.name] if known and kind == "cuda" else scope


__all__ = ["FULL", "FULL_GPU", "QUICK", "QUICK_GPU", "BenchScope", "TimedLayer", "on_kind"]
