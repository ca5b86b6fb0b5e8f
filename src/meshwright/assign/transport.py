"""The transportation problem: items onto bins with room for several, at the least total cost, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Float64s, OutFloat64s, OutInt64s, native


def transported(cost: NDArray[np.float64], room: int, price: NDArray[np.float64] | None = None) -> NDArray[np.int64]:
    """Return the bin of each item, `room` in every bin at most, of the least total of `cost` [items, bins]. `price`
    float64 [bins], of an answer to nearly the same question, makes this one faster where all bins become full."""
    items, bins = cost.shape
    price = np.zeros(bins) if price is None else price
    bin_of, held = np.full(items, -1, np.int64), np.zeros(bins, np.int64)
    inside, scratch = np.full(bins * room, -1, np.int64), np.zeros(bins)
    marks = np.zeros(3 * bins, np.int64)
    _transport(np.ascontiguousarray(cost).ravel(), items, bins, room, bin_of, held, inside, price, scratch, marks)
    return bin_of


@native("num_items", "num_items", "bins")
def _transport(
    cost: Float64s,
    num_items: int,
    bins: int,
    room: int,
    bin_of: OutInt64s,
    held: OutInt64s,
    inside: OutInt64s,
    price: OutFloat64s,
    distance: OutFloat64s,
    marks: OutInt64s,
) -> None:
    """Write ``bin_of`` by shortest augmenting paths (Jonker and Volgenant, 1987), for bins with room for several.
    ``inside`` [bins * room] are the items of each bin; ``marks`` [3 * bins]: whether a bin is done, and the item and
    the bin by which it was reached."""
    for item in range(num_items):
        for one in range(bins):
            distance[one] = cost[item * bins + one] - price[one]
            marks[one] = 0
            marks[bins + one] = item
            marks[2 * bins + one] = -1
        sink, least = -1, 0.0
        while sink < 0:
            nearest = -1
            for one in range(bins):
                if marks[one] == 0 and (nearest < 0 or distance[one] < distance[nearest]):
                    nearest = one
            least = distance[nearest]
            marks[nearest] = 1
            if held[nearest] < room:
                sink = nearest
                break
            for place in range(room):
                row = inside[nearest * room + place]
                base = least - (cost[row * bins + nearest] - price[nearest])
                for one in range(bins):
                    if marks[one] == 0:
                        through = base + cost[row * bins + one] - price[one]
                        if through < distance[one] - 1e-15:
                            distance[one] = through
                            marks[bins + one] = row
                            marks[2 * bins + one] = nearest
        for one in range(bins):
            if marks[one] == 1 and one != sink:
                price[one] += distance[one] - least
        one = sink
        free = held[sink]
        held[sink] += 1
        while True:
            row = marks[bins + one]
            before = marks[2 * bins + one]
            inside[one * room + free] = row
            bin_of[row] = one
            if before < 0:
                break
            for place in range(room):
                if inside[before * room + place] == row:
                    free = place
            one = before
