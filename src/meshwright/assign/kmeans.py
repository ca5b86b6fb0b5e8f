"""k-means: points onto the centres that they are nearest to (Lloyd 1982), from centres drawn far from each other
(k-means++, Arthur and Vassilvitskii 2007), and a linear classifier of classes by points.

Sizes are not bounded: a centre has as many points as lie nearest to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Passes over the points, at most, and steps of the classifier.
PASSES, STEPS = 50, 200
#: How strongly the classifier's weights are held small.
HELD = 1e-3


def centres(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.float64]:
    """Return so many centres [count, width] of points [n, width], of which there are as many at least. A centre that
    lost all of its points takes the one that is farthest from its own."""
    rng = np.random.default_rng(seed)
    found = [points[rng.integers(len(points))]]
    away = np.full(len(points), np.inf)
    for _ in range(count - 1):
        away = np.minimum(away, ((points - found[-1]) ** 2).sum(1))
        total = away.sum()
        found.append(points[rng.choice(len(points), p=away / total) if total > 0 else rng.integers(len(points))])
    middle = np.stack(found)
    for _ in range(PASSES):
        distance = squared(points, middle)
        of = distance.argmin(1)
        after = middle.copy()
        least = distance[np.arange(len(points)), of]
        for number in range(count):
            mine = of == number
            if mine.any():
                after[number] = points[mine].mean(0)
            else:
                after[number] = points[least.argmax()]
                least[least.argmax()] = -1.0
        if np.array_equal(after, middle):
            break
        middle = after
    return middle


def squared(points: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return squared distances [n, count] of points from centres."""
    return (points**2).sum(1)[:, None] - 2 * points @ middle.T + (middle**2).sum(1)


def nearest(points: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the centre that each point is nearest to."""
    return squared(points, middle).argmin(1)


def ranked(points: NDArray[np.float64], middle: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the so many centres [n, count] that each point is nearest to, the nearest first."""
    return np.argsort(squared(points, middle), axis=1, kind="stable")[:, :count]


def classifier(points: NDArray[np.float64], of: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return the weights [width + 1, count] of a linear logistic classifier of so many classes, the last row a bias:
    gradient descent on the cross-entropy, whose step is the inverse of the largest curvature that it can have."""
    x = np.concatenate((points, np.ones((len(points), 1))), axis=1)
    weights, step = np.zeros((x.shape[1], count)), 2.0 / (float(np.linalg.norm(x, 2)) ** 2 / len(x) + 2 * HELD)
    before, one = weights, np.eye(count)[of]
    for number in range(STEPS):  # with Nesterov's momentum
        ahead = weights + number / (number + 3) * (weights - before)
        slope = x.T @ (shares(points, ahead) - one) / len(x) + HELD * ahead
        before, weights = weights, ahead - step * slope
    return weights


def shares(points: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the classifier's probabilities [n, count] of the classes of points."""
    scores = points @ weights[:-1] + weights[-1]
    scores -= scores.max(1, keepdims=True)
    grown = np.exp(scores)
    return grown / grown.sum(1, keepdims=True)
