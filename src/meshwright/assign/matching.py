"""Matching: pairs of rows and columns of the greatest total weight, each in one pair at most, exactly.

The Hungarian method (Kuhn 1955) in the form that adds one row at a time along a shortest augmenting path (Jonker and
Volgenant 1987): O(rows^2 columns).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def heaviest_matching(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column of every row of `weights` [R, C], -1 for those of no pair, so that the sum is the greatest.
    Weights are finite; what has a weight of 0 or less is never a pair.

    Raises:
        ValueError: weights that are not finite, or no matrix.
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 2 or not np.isfinite(weights).all():
        raise ValueError(f"weights are a matrix of finite numbers, and these have the shape {weights.shape}")
    rows, columns = weights.shape
    wide = np.zeros((rows, columns + rows))  # a column of weight 0 for each row: it may stay alone
    wide[:, :columns] = np.maximum(weights, 0.0)
    column = _least_cost(wide.max(initial=0.0) - wide)
    alone = (column >= columns) | (wide[np.arange(rows), column] <= 0.0)
    return np.where(alone, -1, column)


def _least_cost(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column of every row so that all rows have one and the sum is least; there are as many columns."""
    rows, columns = cost.shape
    of_row, of_column = np.zeros(rows + 1), np.zeros(columns + 1)  # prices; place 0 is outside of the matrix
    row_of, before = np.zeros(columns + 1, np.int64), np.zeros(columns + 1, np.int64)
    for row in range(1, rows + 1):
        row_of[0], here = row, 0
        least, done = np.full(columns + 1, np.inf), np.zeros(columns + 1, bool)
        while True:
            done[here] = True
            reduced = cost[row_of[here] - 1] - of_row[row_of[here]] - of_column[1:]
            nearer = ~done[1:] & (reduced < least[1:])
            least[1:][nearer], before[1:][nearer] = reduced[nearer], here
            after = int(np.argmin(np.where(done, np.inf, least)))
            step = least[after]
            of_row[row_of[done]] += step
            of_column[done] -= step
            least[~done] -= step
            here = after
            if row_of[here] == 0:
                break
        while here:
            row_of[here] = row_of[before[here]]
            here = int(before[here])
    found = np.zeros(rows, np.int64)
    taken = np.flatnonzero(row_of[1:]) + 1
    found[row_of[taken] - 1] = taken - 1
    return found
