"""Two small fits: constants of a formula by coordinate descent, a table of residuals by weighted least squares.

Both minimise the mean absolute log of predicted over measured, so that a row twice too slow and one twice too
fast weigh the same and a few odd rows do not bend the rest. Nothing is random: equal tables give equal curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit

from meshwright.cost.curve import CurveShape

#: First step of a constant, as a factor; it grows while it helps and shrinks when neither way does.
FIRST_STEP = 0.15
LAST_STEP = 2e-3
SWEEPS = 60
#: Smoothness of the residual: weight of its second differences against one measured row, and of its size.
STIFFNESS = 1.0
SHRINKAGE = 0.05
#: Residuals below this (of a natural logarithm) count as squared, above as absolute.
NOISE = 0.03

Loop = Callable[[np.ndarray, Sequence[float], np.ndarray, np.ndarray], None]
_LOOPS: dict[str, Loop] = {}


def loop(shape: CurveShape) -> Loop:
    """The formula of a shape over rows, compiled: ``loop(shape)(points, hardware, constants, out)``."""
    if shape.name not in _LOOPS:
        seconds = njit(shape.seconds)

        @njit
        def over(points, hardware, constants, out):
            for i in range(len(points)):
                out[i] = seconds(points[i], hardware, constants)

        _LOOPS[shape.name] = over
    return _LOOPS[shape.name]


def evaluate(shape: CurveShape, points: np.ndarray, hardware: tuple[float, ...], constants: np.ndarray) -> np.ndarray:
    """Seconds of the bare formula at each point."""
    out = np.empty(len(points))
    loop(shape)(points, hardware, constants, out)
    return out


def fit_constants(
    shape: CurveShape, loss: Callable[[np.ndarray], float], start: np.ndarray, *, sweeps: int = SWEEPS
) -> np.ndarray:
    """Return constants within their bounds that no single step improves, after so many sweeps over all of them."""
    low = np.array([c.low for c in shape.constants])
    high = np.array([c.high for c in shape.constants])
    best, least = start.copy(), loss(start)
    step = np.full(len(start), FIRST_STEP)
    for _ in range(sweeps):
        for j in range(len(best)):
            if low[j] == high[j]:  # it stays where it is
                step[j] = 0.0
                continue
            for sign in (1.0, -1.0):
                tried = best.copy()
                tried[j] = np.clip(max(best[j], 1e-3 * high[j]) * np.exp(sign * step[j]), low[j], high[j])
                value = loss(tried)
                if value < least:
                    best, least = tried, value
                    step[j] = min(1.0, step[j] * 1.3)
                    break
            else:
                step[j] *= 0.6
        if step.max() < LAST_STEP:
            break
    return best


def bounded_step(
    error: np.ndarray, slope: np.ndarray, weight: np.ndarray, low: np.ndarray, high: np.ndarray, *, small: float
) -> np.ndarray:
    """Return the move [m] between bounds that lowers the sum of absolute errors [n] times their weights most, where
    these follow their derivatives ``slope`` [m, n]: bounded least squares whose weights are the inverse errors
    (iteratively reweighted, Beaton and Tukey 1974). Errors below ``small`` weigh no more."""
    move = np.zeros(len(slope))
    for _ in range(20):
        each = weight / np.maximum(np.abs(error + move @ slope), small)
        square = (slope * each) @ slope.T
        square[np.diag_indices_from(square)] += 1e-3 * len(error)  # what no error tells of stays where it is
        pull = (slope * each) @ error
        places = list(zip(square, square.diagonal().tolist(), pull.tolist(), low.tolist(), high.tolist()))
        for _ in range(50):  # by one after the other, each within its bounds
            before = move.tolist()
            for place, (row, own, pulled, least, most) in enumerate(places):
                rest = pulled + float(row @ move) - own * float(move[place])
                move[place] = min(max(-rest / own, least), most)
            if move.tolist() == before:
                break
    return move


class Grid:
    """Where each row of a fit reads the table: indices and weights of the corners of its cell."""

    def __init__(self, nodes: Sequence[Sequence[float]], coordinates: np.ndarray):
        """``coordinates`` [rows, axes]; an axis with one node is not used."""
        self.shape = tuple(len(n) for n in nodes)
        self.index = np.zeros((len(coordinates), 1), dtype=np.int64)
        self.weight = np.ones((len(coordinates), 1))
        stride = int(np.prod(self.shape))
        for axis, knots in enumerate(nodes):
            stride //= len(knots)
            if len(knots) == 1:
                continue
            at = np.asarray(knots)
            x = np.clip(coordinates[:, axis], at[0], at[-1])
            place = np.clip(np.searchsorted(at, x, side="right") - 1, 0, len(at) - 2)
            f = (x - at[place]) / (at[place + 1] - at[place])
            low = place[:, None] * stride
            self.index = np.hstack([self.index + low, self.index + low + stride])
            self.weight = np.hstack([self.weight * (1 - f)[:, None], self.weight * f[:, None]])

    def read(self, table: np.ndarray) -> np.ndarray:
        return (self.weight * table[self.index]).sum(1)


def roughness(shape: tuple[int, ...]) -> np.ndarray:
    """The penalty [cells, cells]: second differences along every axis, and a little of the values themselves."""
    count = int(np.prod(shape))
    cells = np.arange(count).reshape(shape)
    penalty = np.eye(count) * STIFFNESS * SHRINKAGE
    for axis, size in enumerate(shape):
        if size < 3:
            continue
        along = np.moveaxis(cells, axis, 0)
        for i in range(1, size - 1):
            triple = np.stack([along[i - 1].ravel(), along[i].ravel(), along[i + 1].ravel()])
            for a, wa in zip(triple, (1.0, -2.0, 1.0)):
                for b, wb in zip(triple, (1.0, -2.0, 1.0)):
                    np.add.at(penalty, (a, b), STIFFNESS * wa * wb)
    return penalty


def fit_table(grids: Sequence[Grid], parts: Sequence[np.ndarray], around: np.ndarray, log_s: np.ndarray) -> np.ndarray:
    """The residual table: each row's seconds are its ``around`` plus, for each of its kernels, the formula's seconds
    ``parts`` times the exponential of the table where the kernel reads it."""
    penalty = roughness(grids[0].shape)
    table = np.zeros(len(penalty))
    index = np.hstack([g.index for g in grids])
    for _ in range(8):
        times = [p * np.exp(g.read(table)) for p, g in zip(parts, grids)]
        total = around + sum(times)
        slope = np.hstack([g.weight * (t / total)[:, None] for g, t in zip(grids, times)])
        error = log_s - np.log(total)
        target = error + (slope * table[index]).sum(1)
        weight = NOISE / np.maximum(np.abs(error), NOISE)
        table = _solve(index, slope, target, weight, penalty)
    return table


def _solve(
    index: np.ndarray, slope: np.ndarray, target: np.ndarray, weight: np.ndarray, penalty: np.ndarray
) -> np.ndarray:
    left, right = penalty.copy(), np.zeros(len(penalty))
    _accumulate(index, slope, target, weight, left, right)
    return np.linalg.solve(left, right)


@njit(cache=True)
def _accumulate(index, slope, target, weight, left, right):
    for r in range(len(index)):
        for a in range(index.shape[1]):
            i, v = index[r, a], slope[r, a] * weight[r]
            right[i] += v * target[r]
            for b in range(index.shape[1]):
                left[i, index[r, b]] += v * slope[r, b]
