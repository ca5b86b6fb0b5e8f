"""PowerSGD: a gradient matrix travels as two thin factors of one power iteration, with the error fed back (Vogels et
al., 2019, arXiv 1905.13727, algorithm 1)."""

from __future__ import annotations

import numpy as np


def compress(
    gradients: np.ndarray, right: np.ndarray, errors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Take one step on gradients [replicas, n, m], the right factor [m, r] and errors [replicas, n, m]; the decoded
    mean [n, m], the next right factor, the errors to feed back, and the elements a replica sends."""
    fed = gradients + errors
    left = np.linalg.qr((fed @ right).mean(axis=0))[0]  # an all-reduce of P, then its columns made orthogonal
    own = fed.swapaxes(1, 2) @ left
    mean = own.mean(axis=0)  # an all-reduce of Q
    decoded = left @ mean.T
    return decoded, mean, fed - decoded, left.size + mean.size
