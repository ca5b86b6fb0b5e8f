"""The exact partition against every partition there is."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.assign.partition import partition


@st.composite
def tasks(draw):
    stages, layers = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    times = st.integers(1, 9).map(float)
    table = np.array(
        draw(st.lists(st.lists(times, min_size=layers, max_size=layers), min_size=stages, max_size=stages))
    )
    held = np.array(draw(st.lists(times, min_size=layers, max_size=layers)))
    room = draw(st.lists(st.integers(4, 40).map(float), min_size=stages, max_size=stages))
    return table, held, room, draw(times), draw(times)


@given(tasks())
def test_no_other_partition_that_fits_has_a_faster_slowest_stage(task):
    table, held, room, first, last = task
    stages, layers = table.shape
    found = partition(table, first=[first] * stages, last=[last] * stages, num_bytes=held, capacity_bytes=room)

    def slowest(counts):
        ends = np.concatenate([[0], np.cumsum(counts)])
        if any(held[a:b].sum() > room[s] for s, (a, b) in enumerate(pairwise(ends))):
            return np.inf
        times = [table[s, a:b].sum() for s, (a, b) in enumerate(pairwise(ends))]
        times[0] += first
        times[-1] += last
        return max(times)

    cuts = combinations(range(1, layers), stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, layers))) for cut in cuts]
    best = min(map(slowest, every), default=np.inf)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert sum(found) == layers
        assert slowest(found) == best


def test_a_head_as_slow_as_two_layers_takes_the_place_of_two():
    """By hand: 10 layers of 1 s on two stages and a head of 2 s: 6 and 4 with the head are 6 s each."""
    assert partition(np.ones((2, 10)), last=[2.0, 2.0]) == (6, 4)


def test_a_device_twice_as_fast_holds_twice_the_layers():
    """By hand: 9 layers of 1 s and 2 s."""
    assert partition(np.array([[2.0] * 9, [1.0] * 9])) == (3, 6)
