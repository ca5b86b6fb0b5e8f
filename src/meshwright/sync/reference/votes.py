"""Distributed Lion: replicas send the sign of their update, one bit a number, and apply the majority or the mean of all
(Liu et al., 2024, arXiv 2404.00438)."""

from __future__ import annotations

import numpy as np


def lion_votes(momentum: np.ndarray, slopes: np.ndarray, beta: float = 0.9) -> np.ndarray:
    """Return what a replica sends: the sign, 1 or -1, of its interpolated momentum."""
    return np.where(beta * momentum + (1 - beta) * slopes >= 0, 1.0, -1.0)


def combined(votes: np.ndarray, majority: bool) -> np.ndarray:
    """Return what all apply of votes [replicas, n]: the sign of their sum, or their mean."""
    return np.sign(votes.sum(axis=0)) if majority else votes.mean(axis=0)
