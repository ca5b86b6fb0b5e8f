"""Tasks onto groups: the dynamic program finds what trying all ways does."""

from itertools import product

import numpy as np
import pytest

from meshwright.assign.splits import even, split, worth


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_split_is_the_best_of_all_ways(count):
    affinity = np.random.default_rng(count).normal(size=(5, 5))

    def total(places):
        return sum(worth(affinity, tuple(np.flatnonzero(np.array(places) == g))) for g in range(count))

    ways = [places for places in product(range(count), repeat=5) if len(set(places)) == count]
    found = split(affinity, count)
    assert sorted(sum(found, ())) == list(range(5)) and len(found) == count and found[0][0] == 0
    assert sum(worth(affinity, group) for group in found) == pytest.approx(max(map(total, ways)))


def test_tasks_that_harm_each_other_part_and_one_that_none_helps_is_alone():
    friends = np.array([[9, 5, -4, -1], [5, 9, -4, -1], [-4, -4, 9, -1], [-1, -1, -1, 9]]) / 10
    assert split(friends, 2) == ((0, 1), (2, 3))
    assert split(friends, 3) == ((0, 1), (2,), (3,))
    assert worth(friends, (2,)) == pytest.approx(-0.3) and worth(friends, (0, 1)) == pytest.approx(1.0)
    assert even(5, 2) == ((0, 1, 2), (3, 4))
