"""Trees from what a question is to what a technique gains on it: extremely randomised ones (Geurts et al., 2006,
doi 10.1007/s10994-006-6226-1), whose mean is what is expected."""

from __future__ import annotations

import numpy as np

from meshwright.native import Float64s, OutFloat64s, OutInt64s, native

#: Trees whose mean is taken, and the questions of the smallest leaf.
TREES, LEAF = 64, 2
#: Splits that leave as much scatter to this share are alike: the first of them is taken, however sums are rounded.
TIE = 1e-9


class GainTrees:
    """Trees from features [questions, features] to a technique's log gains [questions]. The same records always give
    the same trees."""

    def __init__(self, x: np.ndarray, gains: np.ndarray, seed: int = 0):
        count, features = x.shape
        most = TREES * max(count, 1)  # no leaf has fewer than LEAF questions, and no tree more nodes than questions
        self._root, self._feature, self._below, self._above = (np.zeros(n, np.int64) for n in (TREES, most, most, most))
        self._threshold, self._mean = np.zeros(most), np.zeros(most)
        draws = np.random.default_rng(seed).random(most * features)
        values = (np.ascontiguousarray(one, np.float64).ravel() for one in (x, gains))
        room = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(3 * count + 3, np.int64)
        nodes = self._root, self._feature, self._threshold, self._below, self._above, self._mean
        _grow(TREES, count, features, LEAF, *values, draws, *room, *nodes)

    def __call__(self, x: np.ndarray) -> float:
        """Return the log gain of a question with features `x`."""
        node = self._root
        while True:  # a leaf is its own child
            low = x[self._feature[node]] < self._threshold[node]
            child = np.where(low, self._below[node], self._above[node])
            if np.array_equal(child, node):
                return float(self._mean[node].mean())
            node = child


@native("trees", "n", "features")
def _grow(
    trees: int,
    n: int,
    features: int,
    leaf: int,
    x: Float64s,
    gains: Float64s,
    draws: Float64s,
    rows: OutInt64s,
    beside: OutInt64s,
    stack: OutInt64s,
    root: OutInt64s,
    feature: OutInt64s,
    threshold: OutFloat64s,
    below: OutInt64s,
    above: OutInt64s,
    mean: OutFloat64s,
) -> int:
    """Grow trees on questions [n], of which ``draws`` in [0, 1) say the thresholds one after the other: of one drawn
    for every feature, a node takes the one that leaves least scatter. Return the number of nodes, of which each has a
    ``feature``, a ``threshold``, the nodes ``below`` and ``above`` it, and the ``mean`` log gain of its questions; a
    leaf has itself on both sides. ``rows`` [n], ``beside`` [n] and ``stack`` [3 n + 3] are room to work in."""
    made = drawn = 0
    for tree in range(trees):
        for i in range(n):
            rows[i] = i
        root[tree] = made
        stack[0] = made
        stack[1] = 0
        stack[2] = n
        depth = 1
        made += 1
        while depth > 0:
            depth -= 1
            node = stack[3 * depth]
            first = stack[3 * depth + 1]
            last = stack[3 * depth + 2]
            size = last - first
            total = 0.0
            lowest = highest = gains[rows[first]]
            for i in range(first, last):
                gain = gains[rows[i]]
                total += gain
                lowest = gain if gain < lowest else lowest
                highest = gain if gain > highest else highest
            mean[node] = total / size
            below[node] = node
            above[node] = node
            if size < 2 * leaf or lowest == highest:
                continue
            chosen = -1
            best = at = 0.0
            for one in range(features):
                low = high = x[rows[first] * features + one]
                for i in range(first, last):
                    value = x[rows[i] * features + one]
                    low = value if value < low else low
                    high = value if value > high else high
                cut = low + (high - low) * draws[drawn]
                drawn += 1
                count = 0
                under = 0.0
                for i in range(first, last):
                    if x[rows[i] * features + one] < cut:
                        count += 1
                        under += gains[rows[i]]
                if count < leaf or size - count < leaf:
                    continue
                # what is left of the squares is least where the means of both sides, squared, weigh most
                kept = under * under / count + (total - under) * (total - under) / (size - count)
                if chosen < 0 or kept > best * (1.0 + TIE):
                    chosen = one
                    best = kept
                    at = cut
            if chosen < 0:
                continue
            middle = first
            moved = 0
            for i in range(first, last):
                row = rows[i]
                if x[row * features + chosen] < at:
                    rows[middle] = row
                    middle += 1
                else:
                    beside[moved] = row
                    moved += 1
            for i in range(moved):
                rows[middle + i] = beside[i]
            feature[node] = chosen
            threshold[node] = at
            below[node] = made
            above[node] = made + 1
            stack[3 * depth] = made + 1
            stack[3 * depth + 1] = middle
            stack[3 * depth + 2] = last
            stack[3 * depth + 3] = made
            stack[3 * depth + 4] = first
            stack[3 * depth + 5] = middle
            depth += 2
            made += 2
    return made


__all__ = ["LEAF", "TREES", "GainTrees"]
