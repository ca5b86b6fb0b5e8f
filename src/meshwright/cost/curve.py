"""Fitted curves: a physical formula with a few constants, and a coarse table of the residual it leaves.

Inside the measured range the residual is interpolated between the nodes of a grid in powers of two; outside it
fades to nothing, and the physics alone speaks. What NeuSight (2407.13853) and CDMPP (2311.09690) learn for
transfer is here the constants: they are fractions of the hardware's own figures, so they carry over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import log10
from typing import NamedTuple

import msgspec

from meshwright.cost.roofline import L2_BYTES_PER_CLOCK, peak_flops
from meshwright.spec.hardware import Device

#: Octaves outside the measured range over which the residual fades to the bare physics.
FADE_OCTAVES = 4.0
#: Residuals are stored as whole numbers of this much of a natural logarithm.
RESIDUAL_UNIT = 0.005
#: Sigma is kept apart by what the curve says a kernel takes: below 10 us, 100 us, 1 ms, and above.
SIGMA_CLASSES = ("<10us", "<100us", "<1ms", ">=1ms")


class Constant(NamedTuple):
    """One constant of a shape: unit, meaning, where the fit starts, and the bounds it keeps to."""

    name: str
    unit: str
    meaning: str
    start: float
    low: float
    high: float


class CurveShape(NamedTuple):
    """A physical formula: ``seconds(x, hw, p)``, ``axes(x)`` for its residual, names, constants, default nodes."""

    name: str
    seconds: Callable
    axes: Callable
    axis_names: tuple[str, ...]
    constants: tuple[Constant, ...]
    nodes: tuple[tuple[float, ...], ...]


def hardware(device: Device, dtype: str, *, slower: float = 1.0) -> tuple[float, ...]:
    """(multiprocessors, FLOP/s of one, memory bytes/s, L2 bytes/s of one multiprocessor, L2 bytes, matrix FLOP
    per four exponentials), at a clock ``slower`` times the device's."""
    clock = (device.clock_mhz or 1500.0) * 1e6 * slower
    per_sm = peak_flops(device, dtype) * slower / device.num_sms
    exponentials = per_sm / clock / (4.0 * device.exponentials_per_clock)
    l2 = float(device.l2_bytes or 6e6)
    return float(device.num_sms), per_sm, device.memory_gb_s * 1e9, L2_BYTES_PER_CLOCK * clock, l2, exponentials


class Fit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fitted curve as it is stored.

    Attributes:
        op: gemm, grouped_gemm, prefill, decode, flash_fwd or flash_bwd; `dtype` the compute precision.
        source: tables, library and version the curve was fitted to; `rows` of them.
        constants: name -> value, units as `Shape.constants` says.
        nodes: grid of the residual per axis, in powers of two; an axis with one node is not used.
        residual: log of measured over physics at the nodes, last axis fastest, in units of `RESIDUAL_UNIT`.
        low, high: measured range per axis, in powers of two.
        sigma: spread (one standard deviation of the log) that covers 80% of rows held out, per `SIGMA_CLASSES`.
        shared_bound: of decode: whether `SHARED_HEADS` bounds the sharing of keys.
        errors: absolute relative errors as fractions: in sample and held out, median and 90th percentile.
    """

    op: str
    dtype: str
    source: str
    rows: int
    constants: dict[str, float]
    nodes: tuple[tuple[float, ...], ...]
    residual: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    sigma: tuple[float, ...]
    shared_bound: bool = False
    errors: dict[str, float] = {}


class CurveProfile(msgspec.Struct, frozen=True, kw_only=True):
    """All curves of one device: one file of ``catalog/profiles/kernels``."""

    format_version: int
    code_version: str
    device: str
    curves: tuple[Fit, ...]


class Residual:
    """The table of a fit, interpolated linearly between its nodes."""

    def __init__(self, fit: Fit):
        self._values = [v * RESIDUAL_UNIT for v in fit.residual]
        self._axes: list[tuple[int, Sequence[float], int]] = []
        stride = 1
        for i in reversed(range(len(fit.nodes))):
            if len(fit.nodes[i]) > 1:
                self._axes.append((i, fit.nodes[i], stride))
            stride *= len(fit.nodes[i])
        self._range = tuple(zip(fit.low, fit.high))

    def outside(self, at: Sequence[float]) -> float:
        """Octaves between a point and the measured range, summed over axes; 0 inside."""
        far = 0.0
        for x, (low, high) in zip(at, self._range):
            if x < low:
                far += low - x
            elif x > high:
                far += x - high
        return far

    def at(self, at: Sequence[float]) -> float:
        """Return the log residual at a point: of measured over physical seconds."""
        cells = [(0, 1.0)]
        for i, nodes, stride in self._axes:
            x = at[i]
            place = bisect_right(nodes, x) - 1
            if place < 0:
                continue
            if place >= len(nodes) - 1:
                cells = [(index + (len(nodes) - 1) * stride, w) for index, w in cells]
                continue
            f = (x - nodes[place]) / (nodes[place + 1] - nodes[place])
            low, rest = place * stride, 1.0 - f
            cells = [(i + low, w * rest) for i, w in cells] + [(i + low + stride, w * f) for i, w in cells]
        values = self._values
        return sum([values[i] * w for i, w in cells])


def sigma_class(seconds: float) -> int:
    """Return the index into `Fit.sigma` of a duration's class."""
    return min(3, max(0, int(log10(max(seconds, 1e-9)) + 6.0)))
