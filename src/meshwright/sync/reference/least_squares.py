"""A least-squares problem whose examples lie on replicas: what the references are tried on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.sync.codecs import Codec

#: Makes of an array what arrives of it.
Send = Callable[[np.ndarray], np.ndarray]


class LeastSquares:
    """Noisy linear targets of 64 random examples a replica: features [replicas, 64, weights]."""

    def __init__(self, replicas: int = 8, weights: int = 8, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.features = rng.standard_normal((replicas, 64, weights))
        self.targets = self.features @ rng.standard_normal(weights) + 0.1 * rng.standard_normal((replicas, 64))
        self.start = np.zeros(weights)

    def slopes(self, w: np.ndarray) -> np.ndarray:
        """Return every replica's gradient [replicas, weights] at its own row of `w`, or all at one point [weights]."""
        at = np.broadcast_to(w, (len(self.features), w.shape[-1]))
        wrong = np.einsum("rni,ri->rn", self.features, at) - self.targets
        return np.einsum("rni,rn->ri", self.features, wrong) / self.features.shape[1]

    def loss(self, w: np.ndarray) -> float:
        """Return the mean squared error of weights [weights] on all examples."""
        return float(np.mean((self.features @ w - self.targets) ** 2))

    def loss_of(self, replica: int, w: np.ndarray) -> float:
        """Return the mean squared error on a replica's own examples."""
        return float(np.mean((self.features[replica] @ w - self.targets[replica]) ** 2))

    def synchronous(self, steps: int, rate: float) -> tuple[np.ndarray, int]:
        """Step with the mean gradient of all replicas; the weights, and the elements a replica sent."""
        w = self.start.copy()
        for _ in range(steps):
            w = w - rate * self.slopes(w).mean(axis=0)
        return w, steps * w.size


def coded(codec: Codec) -> Send:
    """Return a function that encodes and decodes each row of an array by a codec, as if it had been sent."""

    def send(values: np.ndarray) -> np.ndarray:
        rows = values.reshape(-1, values.shape[-1])
        back = [codec.decode(codec.encode(row), len(row), values.dtype) for row in rows]
        return np.array(back).reshape(values.shape)

    return send
