"""Intervals: draws of the errors of the costs, and the 80% interval of the step time that they leave."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from meshwright.causes import ERROR_CLASS, PRICED
from meshwright.simulate.engine import makespans
from meshwright.simulate.rounds import drawn
from meshwright.simulate.simulated import Simulated

#: Draws of the correlated errors behind the interval.
NUM_DRAWS = 20
#: Repeats of the same step differ by this much (docs/accuracy.md, the noise floor): no prediction is surer.
LEAST_SIGMA = 0.03


def interval_draws(run: Simulated) -> np.ndarray:
    """Return the step times in seconds [NUM_DRAWS] under draws of the correlated errors of the costs.

    Each draw has one log-normal factor per error class and one of the framework for the whole step, stratified so that
    few draws represent the distribution. Where the framework was fitted to whole steps, their measured variance already
    contains that of the classes: its factor has the variance that remains, and at least that of a repeated step
    (:data:`LEAST_SIGMA`). Deterministic."""
    classes = sorted(set(ERROR_CLASS.values()))
    rng = np.random.default_rng(0)
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
    sigma = class_sigma(run)
    draws = {c: np.exp(rng.permutation(normal) * sigma[c]) for c in classes}
    factors = np.array([draws[ERROR_CLASS[cause]] for cause in PRICED])
    turn = rng.permutation(normal)
    durations = (run.priced.parts @ factors).T
    steps = np.array(steps_of(run, durations))
    sigma = run.step_sigma
    if run.fitted:
        known = float(np.std(np.log(steps)))
        sigma = max(LEAST_SIGMA, max(0.0, sigma**2 - known**2) ** 0.5)
    return np.exp(turn * sigma) * steps


def steps_of(run: Simulated, durations: np.ndarray) -> np.ndarray:
    """Return the step times under durations [draws, keys], in one call of the engine; where replicas average now and
    then, a round's mean. Where ranks share cores or ports a step takes longer than in order, and its draws as much
    longer."""
    durations = np.vstack([run.priced.parts.sum(axis=1), durations])
    if run.round is not None:
        alone, *steps = drawn(run.lowered.graph, run.lowered.programs, run.round, durations).tolist()
    else:
        alone, *steps = makespans(run.lowered.graph, np.ascontiguousarray(durations)).tolist()
    return np.array(steps) * (run.step_time_s / alone if abs(run.step_time_s - alone) > 1e-9 * alone else 1.0)


def class_sigma(run: Simulated) -> dict[str, float]:
    """The relative error of each class in this step: that of its estimates, weighted by the time they stand for."""
    count = np.bincount(run.lowered.graph.cost_key, minlength=len(run.priced.parts))
    seconds, spread = count @ run.priced.parts, count @ run.priced.spread
    out = {}
    for name in set(ERROR_CLASS.values()):
        mine = [i for i, cause in enumerate(PRICED) if ERROR_CLASS[cause] == name]
        total = float(seconds[mine].sum())
        out[name] = float(spread[mine].sum()) / total if total else 0.0
    return out


def interval(draws: np.ndarray, step: float) -> tuple[float, float]:
    """The 80% interval of a step time, which it lies in."""
    low, high = np.quantile(draws, [0.1, 0.9])
    return min(float(low), step), max(float(high), step)
