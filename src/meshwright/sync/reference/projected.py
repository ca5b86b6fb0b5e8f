"""A byte a step: replicas share seeds and send their gradient along one random direction (Zelikman et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Steps of the byte to one of the slope, distance of the difference, and step of the weights.
SCALE, APART, RATE = 8, 1e-3, 2e-3


def direction(step: int, replica: int, weights: int) -> np.ndarray:
    """Return the direction of a replica at a step, which all can draw from the seeds they share."""
    return np.random.default_rng((step, replica)).standard_normal(weights)


def code(loss: Callable[[np.ndarray], float], w: np.ndarray, along: np.ndarray) -> np.int8:
    """Return the slope of a loss along a direction, by its difference, as one byte."""
    slope = (loss(w + APART * along) - loss(w - APART * along)) / (2 * APART)
    return np.int8(np.clip(np.round(slope * SCALE), -127, 127))


def stepped(w: np.ndarray, step: int, codes: list[np.int8]) -> np.ndarray:
    """Return the weights after a step along every replica's direction, by the bytes that all received."""
    for replica, one in enumerate(codes):
        w = w - RATE * one / SCALE * direction(step, replica, w.size)
    return w
