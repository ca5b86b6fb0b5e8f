"""Fits kernel curves to op tables: a few physical constants, then a coarse table of what they leave.

Accuracy is what whole groups of rows held out show, in-sample figures come second, a device left out entirely
third (``transfer.py``); the curve that ships is fitted to every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.fitting import Grid, evaluate, fit_constants, fit_table
from meshwright.calibrate.samples import Sample, shape_of
from meshwright.cost.curve import RESIDUAL_UNIT, SIGMA_CLASSES, CurveProfile, Fit, sigma_class
from meshwright.cost.fitted import FORMAT_VERSION
from meshwright.errors import MeshwrightError
from meshwright.version import VERSION

#: A class of durations with fewer rows held out takes the spread of all.
FEWEST_ROWS = 50
#: A row of which its kernels are predicted to take less says nothing of them.
LEAST_SHARE = 0.2
#: The normal distribution's central 80% lies within this many standard deviations.
NORMAL_80 = 1.2816
#: A residual has at most so many cells, and at most one per so many rows.
MOST_CELLS = 1300
ROWS_PER_CELL = 8
#: A table needs this many rows per constant of its formula, or the fit is under-determined.
ROWS_PER_CONSTANT = 5


class FitConstants(NamedTuple):
    """A fit before it is stored: constants, the nodes of its table, and the table in natural logarithms."""

    values: np.ndarray
    shared_bound: bool
    nodes: tuple[tuple[float, ...], ...]
    table: np.ndarray


class FittedCurve(NamedTuple):
    """A stored curve with the predictions behind its report: seconds predicted for every row by the curve that saw
    them all, and for the rows held out by the one that did not."""

    sample: Sample
    fit: Fit
    in_sample_s: np.ndarray
    held_out: np.ndarray
    held_out_s: np.ndarray


def fit(sample: Sample, holdout: float = 0.2) -> FittedCurve:
    """The curve of a sample, its spread from rows held out.

    Raises:
        MeshwrightError: K007 when the rows are too few for the constants.
    """
    shape = shape_of(sample)
    needed = ROWS_PER_CONSTANT * len(shape.constants)
    held = sample.groups < holdout
    if (~held).sum() < needed:
        raise MeshwrightError.one(
            "K007",
            f"{(~held).sum()} rows for {len(shape.constants)} constants of {sample.op} {sample.dtype}",
            place=f"{sample.device.name}: {sample.source}",
            help=f"at least {needed} rows outside the holdout are needed",
        )
    nodes = _nodes(sample)
    if held.any():
        part = _learn(sample.where(~held), nodes)
        held_s = predict(sample.where(held), part)
        whole = _learn(sample, nodes, start=part)
    else:
        whole = _learn(sample, nodes)
        held_s = np.empty(0)
    whole = whole._replace(table=np.round(whole.table / RESIDUAL_UNIT) * RESIDUAL_UNIT)
    seen_s = predict(sample, whole)
    return FittedCurve(sample, _stored(sample, whole, seen_s, held, held_s), seen_s, held, held_s)


def predict(sample: Sample, constants: FitConstants, *, bare: bool = False) -> np.ndarray:
    """Seconds of every row; `bare` without the table."""
    parts, grids = _parts(sample, constants.values, constants.shared_bound), _grids(sample, constants)
    if bare:
        return sample.around_s + sum(parts)
    return sample.around_s + sum(p * np.exp(g.read(constants.table)) for p, g in zip(parts, grids))


def coordinates(sample: Sample, points: np.ndarray, shared_bound: bool) -> np.ndarray:
    """Where each row reads the table: [rows, axes] in powers of two."""
    axes = shape_of(sample).axes
    return np.array([axes(x) for x in _bound(sample, points, shared_bound)])


def _bound(sample: Sample, points: np.ndarray, shared_bound: bool) -> np.ndarray:
    if sample.op != "decode":
        return points
    bound = points.copy()
    bound[:, 7] = float(shared_bound)
    return bound


def _parts(sample: Sample, values: np.ndarray, shared_bound: bool) -> list[np.ndarray]:
    shape, hw = shape_of(sample), sample.hardware
    return [
        np.where(sample.count > c, evaluate(shape, _bound(sample, points, shared_bound), hw, values), 0.0)
        for c, points in enumerate(sample.points)
    ]


def _grids(sample: Sample, constants: FitConstants) -> list[Grid]:
    return [Grid(constants.nodes, coordinates(sample, p, constants.shared_bound)) for p in sample.points]


def _learn(sample: Sample, nodes: tuple[tuple[float, ...], ...], start: FitConstants | None = None) -> FitConstants:
    """Constants first, on the bare formula; then the table. Decoding is tried with and without a bound on sharing."""
    shape, log_s = shape_of(sample), np.log(sample.seconds)
    first = np.array([c.start for c in shape.constants]) if start is None else start.values
    bounds = (False, True) if sample.op == "decode" and start is None else (bool(start and start.shared_bound),)
    tried = []
    for bound in bounds:
        loss = _loss(sample, log_s, bound)
        values = fit_constants(shape, loss, first)
        tried.append((loss(values), bound, values))
    _, bound, values = min(tried, key=lambda t: t[:2])
    values = np.array([float(f"{v:.5g}") for v in values])
    learnt = FitConstants(values, bound, nodes, np.zeros(int(np.prod([len(n) for n in nodes]))))
    grids, parts = _grids(sample, learnt), _parts(sample, values, bound)
    return learnt._replace(table=fit_table(grids, parts, sample.around_s, log_s))


def _loss(sample: Sample, log_s: np.ndarray, shared_bound: bool) -> Callable[[np.ndarray], float]:
    def loss(values: np.ndarray) -> float:
        total = sample.around_s + sum(_parts(sample, values, shared_bound))
        return float(np.abs(np.log(total) - log_s).mean())

    return loss


def _nodes(sample: Sample) -> tuple[tuple[float, ...], ...]:
    """The shape's default nodes that enclose the sample's range; a single node where the range is one point."""
    at = np.vstack(
        [coordinates(sample.where(sample.count > c), p[sample.count > c], True) for c, p in enumerate(sample.points)]
    )
    at = np.vstack([at, *(coordinates(sample, p, False) for p in sample.points[:1] if sample.op == "decode")])
    chosen = []
    for axis, nodes in enumerate(shape_of(sample).nodes):
        low, high = at[:, axis].min(), at[:, axis].max()
        inner = [
            n
            for i, n in enumerate(nodes)
            if (i + 1 == len(nodes) or nodes[i + 1] > low) and (i == 0 or nodes[i - 1] < high)
        ]
        chosen.append(tuple(inner) if high > low else (float(low),))
    return _coarsened(chosen, len(sample.seconds))


def _coarsened(nodes: list[tuple[float, ...]], rows: int) -> tuple[tuple[float, ...], ...]:
    """Every other node of the longest axis left out until the table is small for its rows."""
    while np.prod([len(n) for n in nodes]) > min(MOST_CELLS, rows / ROWS_PER_CELL):
        longest = max(range(len(nodes)), key=lambda axis: len(nodes[axis]))
        if len(nodes[longest]) <= 2:
            break
        nodes[longest] = (*nodes[longest][:-1:2], nodes[longest][-1])
    return tuple(nodes)


def _stored(sample: Sample, learnt: FitConstants, seen_s: np.ndarray, held: np.ndarray, held_s: np.ndarray) -> Fit:
    at = [coordinates(sample, p, learnt.shared_bound)[sample.count > c] for c, p in enumerate(sample.points)]
    at = np.vstack(at)
    errors = {"in_sample_median": median_ape(seen_s, sample.seconds), "in_sample_p90": p90_ape(seen_s, sample.seconds)}
    judged, rows = (held_s, sample.where(held)) if held.any() else (seen_s, sample)
    true = rows.seconds
    if held.any():
        errors |= {"held_out_median": median_ape(held_s, true), "held_out_p90": p90_ape(held_s, true)}
    names = [c.name for c in shape_of(sample).constants]
    return Fit(
        op=sample.op,
        dtype=sample.dtype,
        source=sample.source,
        rows=len(sample.seconds),
        constants=dict(zip(names, map(float, learnt.values))),
        nodes=learnt.nodes,
        residual=tuple(int(v) for v in np.round(learnt.table / RESIDUAL_UNIT)),
        low=tuple(round(float(v), 2) for v in at.min(0)),
        high=tuple(round(float(v), 2) for v in at.max(0)),
        sigma=_sigma(judged, rows),
        shared_bound=learnt.shared_bound,
        errors={name: round(value, 4) for name, value in errors.items()},
    )


def kernel_share(sample: Sample, predicted: np.ndarray) -> np.ndarray:
    """Return the share of each row's predicted seconds that its kernels take, and not what else the row contains: a
    row's relative error over it is the relative error of the kernels, which is what a curve's spread is of."""
    return np.maximum(LEAST_SHARE, (predicted - sample.around_s) / predicted)


def _sigma(predicted: np.ndarray, sample: Sample) -> tuple[float, ...]:
    error = np.abs(np.log(predicted / sample.seconds)) / kernel_share(sample, predicted)
    kind = np.array([sigma_class(s) for s in predicted])
    spread = []
    for i in range(len(SIGMA_CLASSES)):
        own = error[kind == i]
        spread.append(round(float(np.quantile(own if len(own) >= FEWEST_ROWS else error, 0.8)) / NORMAL_80, 4))
    return tuple(spread)


def median_ape(predicted: np.ndarray, true: np.ndarray) -> float:
    """Median absolute relative error, a fraction."""
    return float(np.median(np.abs(predicted / true - 1)))


def p90_ape(predicted: np.ndarray, true: np.ndarray) -> float:
    """90th percentile of the absolute relative error, a fraction."""
    return float(np.quantile(np.abs(predicted / true - 1), 0.9))


def profile(device: str, fits: list[Fit]) -> CurveProfile:
    """All curves of a device, as they are stored."""
    curves = tuple(sorted(fits, key=lambda f: (f.op, f.dtype)))
    return CurveProfile(format_version=FORMAT_VERSION, code_version=VERSION, device=device, curves=curves)
