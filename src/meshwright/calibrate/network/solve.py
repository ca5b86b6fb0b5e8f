"""Fitting a fabric's constants to measured collectives, with little data and many sizes.

Maximum a posteriori in logarithms: relative residuals with a robust weight (Charbonnier), and each constant drawn
towards what fabrics of its kind have, so that what a fabric's own measurements do not tell stays the kind's.
Damped Gauss-Newton with a numeric derivative; deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.calibrate.network.rows import Series
from meshwright.cost.collectives import lines
from meshwright.cost.fabric import Constants

#: What series of many sizes tell; steps at scale come from jobs (``jobs.py``).
AT_SCALE = ("gather_us", "reduce_us", "tree_nodes")
NAMES = tuple(name for name in Constants.__struct_fields__ if name not in AT_SCALE)
#: What a port's large messages reach; searched from several of these shares of the prior.
BANDWIDTHS = tuple(NAMES.index(n) for n in ("all_gather", "reduce_scatter", "all_reduce", "tree", "send", "all_to_all"))
SHARES = (1.0, 0.5)
#: Fractions of a port cannot exceed it.
CAPPED = (
    *BANDWIDTHS,
    *(NAMES.index(n) for n in ("ll", "ll128", "in_network", "send_connection", "exchange_connection")),
)
#: Relative error of one measurement beyond which it counts as an outlier: repeated runs differ by 3 to 6%.
NOISE = 0.08
#: A series weighs as much as so many independent measurements, however many sizes it has.
SERIES_WEIGHT = 12.0
ROUNDS = 40

#: Where every fit starts, and what it is drawn to when no fabric of a kind was measured: NCCL's own tuning
#: constants (src/graph/tuning.cc: protocol latencies; LL carries 8 of 16 bytes, LL128 120 of 128), and ports
#: reached to four fifths.
START = Constants(
    start_ll_us=5.0,
    start_ll128_us=6.5,
    start_simple_us=16.0,
    step_ll=1.4,
    step_ll128=2.0,
    step_simple=3.5,
    ll=0.12,
    ll128=0.5,
    all_gather=0.8,
    reduce_scatter=0.8,
    all_reduce=0.8,
    tree=0.9,
    in_network=0.68,
    own_copy=2.0,
    in_network_start_us=60.0,
    message_start_us=7.0,
    message_simple_us=13.0,
    peer_us=0.2,
    send_connection=0.06,
    exchange_connection=0.02,
    send=0.8,
    all_to_all=0.7,
    contention=0.02,
)


class SeriesCurve:
    """Series of one collective on one group, as the fit sees them: `inside` are the constants of its hops but
    the last, which are sought."""

    def __init__(self, series: list[Series], inside: tuple[Constants, ...]):
        self.op, self.group, self.inside = series[0].op, series[0].group, inside
        self.num_bytes = np.array([b for s in series for b in s.num_bytes])
        self.log_seconds = np.log(np.array([t for s in series for t in s.seconds]))
        counts = [len(s.seconds) for s in series]
        self.weights = np.repeat([min(1.0, SERIES_WEIGHT / n) for n in counts], counts)

    def error(self, constants: Constants) -> np.ndarray:
        """Logarithm of predicted over measured, at every size."""
        curve = np.array(lines(self.op, self.group, (*self.inside, constants)))
        seconds = np.min(curve[:, :1] + curve[:, 1:] * self.num_bytes, axis=0)
        return np.log(seconds) - self.log_seconds


def to_vector(constants: Constants) -> np.ndarray:
    return np.log([max(getattr(constants, name), 1e-4) for name in NAMES])


def to_constants(vector: np.ndarray) -> Constants:
    capped = vector.copy()
    capped[list(CAPPED)] = np.minimum(capped[list(CAPPED)], 0.0)
    return Constants(**{name: float(v) for name, v in zip(NAMES, np.exp(capped))})


def fit(curves: list[SeriesCurve], prior: Constants, looseness: float) -> Constants:
    """The constants of one fabric; `looseness` is how far (in logarithms) they may lie from the prior's.

    Where one algorithm hides another its constants have no slope, so the search starts from several bandwidths.
    """
    weights = np.concatenate([c.weights for c in curves])
    centre = to_vector(prior)

    def error(z: np.ndarray) -> np.ndarray:
        constants = to_constants(z)
        return np.concatenate([c.error(constants) for c in curves])

    tried = []
    for share in SHARES:
        z = centre.copy()
        z[list(BANDWIDTHS)] += np.log(share)
        tried.append(minimise(error, centre, z, weights, looseness))
    return to_constants(min(tried, key=lambda found: found[1])[0])


def minimise(
    error: Callable[[np.ndarray], np.ndarray],
    prior: np.ndarray,
    z: np.ndarray,
    weights: np.ndarray,
    looseness: float,
) -> tuple[np.ndarray, float]:
    """The vector near `prior` with the least robust weighted error, searched from `z`, and its cost."""
    damping = 1.0
    residual = error(z)
    best = _cost(residual, z, prior, weights, looseness)
    for _ in range(ROUNDS):
        slope = _slopes(error, z, residual)
        robust = weights / np.sqrt(1 + (residual / NOISE) ** 2) / NOISE**2
        normal = slope.T @ (robust[:, None] * slope) + np.eye(len(z)) / looseness**2
        gradient = slope.T @ (robust * residual) + (z - prior) / looseness**2
        improved = False
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = z + np.clip(step, -0.7, 0.7)
            residual_tried = error(tried)
            cost = _cost(residual_tried, tried, prior, weights, looseness)
            if cost < best:
                improved = best - cost > 1e-6 * best
                z, residual, best, damping = tried, residual_tried, cost, max(damping / 4, 1e-4)
                break
            damping *= 4
        if not improved:
            break
    return z, best


def _cost(residual: np.ndarray, z: np.ndarray, prior: np.ndarray, weights: np.ndarray, looseness: float) -> float:
    robust = np.sqrt(1 + (residual / NOISE) ** 2) - 1
    return float(np.sum(weights * robust) + 0.5 * np.sum(((z - prior) / looseness) ** 2))


def _slopes(error: Callable[[np.ndarray], np.ndarray], z: np.ndarray, at: np.ndarray) -> np.ndarray:
    slopes = np.empty((len(at), len(z)))
    for i in range(len(z)):
        moved = z.copy()
        moved[i] += 1e-3
        slopes[:, i] = (error(moved) - at) / 1e-3
    return slopes
