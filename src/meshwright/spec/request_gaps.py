"""Gaps between arrivals: exponential, gamma and Weibull, of a mean and a coefficient of variation."""

from __future__ import annotations

import math

import numpy as np


def gaps(
    rng: np.random.Generator, mean: float, cv: float, family: str, count: int, *, first: bool = False
) -> np.ndarray:
    """Draw gaps whose standard deviation is cv times their `mean` [count], from the gamma or the Weibull family.

    Where they are the `first`, they are times from any moment to the next arrival: a gap that a moment falls into is
    longer than others in proportion to its length (length-biased), and the moment lies anywhere in it. Arrivals that
    begin so have the rate 1 / mean from the start (Cox, Renewal Theory, 1962, chapter 5).
    """
    if cv == 1.0:
        return rng.exponential(mean, count)
    part = rng.random(count) if first else 1.0
    if family == "gamma":
        shape = 1.0 / cv**2
        return rng.gamma(shape + first, mean * cv**2, count) * part
    shape = weibull_shape(cv)
    scale = mean / math.gamma(1.0 + 1.0 / shape)
    if first:  # the length-biased one to the power of its shape is gamma distributed
        return scale * rng.gamma(1.0 + 1.0 / shape, 1.0, count) ** (1.0 / shape) * part
    return rng.weibull(shape, count) * scale


def weibull_shape(cv: float) -> float:
    """Return the shape k of a Weibull distribution of that coefficient of variation: 1 + cv^2 is
    Gamma(1 + 2/k) / Gamma(1 + 1/k)^2, which falls as k rises."""
    low, high, wanted = 0.05, 1000.0, math.log1p(cv**2)
    for _ in range(200):
        middle = math.sqrt(low * high)
        over = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) > wanted
        low, high = (middle, high) if over else (low, middle)
    return math.sqrt(low * high)
