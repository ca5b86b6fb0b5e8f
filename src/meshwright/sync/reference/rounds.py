"""DiLoCo: replicas take many steps alone, then their mean change is the gradient of one Nesterov step (Douillard et
al., 2023, arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.sync.reference.least_squares import LeastSquares, Send


def outer_step(
    shared: np.ndarray, speed: np.ndarray, change: np.ndarray, rate: float, momentum: float
) -> tuple[np.ndarray, np.ndarray]:
    """Take a Nesterov step of the shared weights against a mean change; the weights and the speed after it."""
    speed = momentum * speed + change
    return shared - rate * (change + momentum * speed), speed


def rounds(
    problem: LeastSquares,
    steps: int,
    every: int,
    rate: float,
    outer: float = 0.7,
    momentum: float = 0.9,
    send: Send = np.asarray,
    away: Callable[[int], Sequence[int]] = lambda number: (),
) -> tuple[np.ndarray, int]:
    """Train in rounds of `every` steps; the shared weights, and the elements a replica sent.

    `send` is what becomes of changes [replicas, weights] on their way, `away` which replicas miss a round of a number:
    who comes back starts from the shared weights.
    """
    shared, speed, sent = problem.start.copy(), np.zeros_like(problem.start), 0
    for number in range(steps // every):
        here = [r for r in range(len(problem.features)) if r not in away(number)]
        own = np.tile(shared, (len(problem.features), 1))
        for _ in range(every):
            own = own - rate * problem.slopes(own)
        change = send(shared - own[here]).mean(axis=0)
        sent += change.size
        shared, speed = outer_step(shared, speed, change, outer, momentum)
    return shared, sent
