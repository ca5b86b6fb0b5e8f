"""TernGrad: gradients as -s, 0 or s at random, with the gradient as their expectation (Wen et al., 2017,
NeurIPS)."""

from __future__ import annotations

import numpy as np


def ternary(gradients: np.ndarray, rng: np.random.Generator, clip: float = 2.5) -> np.ndarray:
    """Code every replica's gradient [replicas, n], clipped at `clip` standard deviations. The scale s is the largest of
    all replicas, so that sums have few levels."""
    bound = clip * gradients.std(axis=1, keepdims=True)
    held = np.clip(gradients, -bound, bound)
    scale = np.abs(held).max()
    return scale * np.sign(held) * (rng.random(held.shape) < np.abs(held) / scale)
