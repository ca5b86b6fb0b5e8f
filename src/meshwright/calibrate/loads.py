"""Expert loads: how many rows the busiest rank of a mixture of experts gets, and how many of its experts get any.

Tables state skew as a power law: each expert's popularity is drawn from a density x^-alpha between 1 and 0.8 x
tokens (between 0.01 and 2 when there are fewer choices than experts), scaled to tokens x top_k choices, and no
expert gets a token twice. What a rank has to do follows from the busiest of the ranks.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: Draws of popularity averaged; the generator is seeded, so equal questions get equal answers.
DRAWS = 16


@cache
def busiest(tokens: int, experts: int, top_k: int, ep: int, alpha: float) -> tuple[float, float]:
    """(rows, experts with rows) on the busiest of `ep` ranks; alpha 0 spreads evenly."""
    choices, local = tokens * top_k, experts // ep
    if alpha == 0.0:
        rows = max(1.0, choices / ep)
        return rows, min(float(local), rows)
    low, high = (1.0, max(1.5, 0.8 * tokens)) if choices > experts else (0.01, 2.0)
    uniform = np.random.default_rng(0).random((DRAWS, experts))
    power = 1.0 - alpha
    popular = ((high**power - low**power) * uniform + low**power) ** (1.0 / power)
    load = np.round(_choices(popular, choices, tokens)).reshape(DRAWS, ep, local)
    rank = load.sum(2).argmax(1)
    own = load[np.arange(DRAWS), rank]
    return max(1.0, float(own.sum(1).mean())), max(1.0, float((own > 0).sum(1).mean()))


def _choices(popular: np.ndarray, choices: int, most: int) -> np.ndarray:
    """`choices` shared out by popularity [draws, experts], none above `most`: what is too much goes to the others."""
    load = np.zeros_like(popular)
    for _ in range(10):
        weight = np.where(load < most, popular, 0.0)
        left = choices - load.sum(1, keepdims=True)
        load = np.minimum(most, load + left * weight / np.maximum(weight.sum(1, keepdims=True), 1e-30))
    return load


def alpha(distribution: str) -> float:
    """The exponent of ``power_law_1.2``; 0 of ``balanced``."""
    return 0.0 if distribution == "balanced" else float(distribution.rpartition("_")[2])
