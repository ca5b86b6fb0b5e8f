"""Matchings of the greatest weight against every matching there is."""

from itertools import product

import numpy as np
import pytest

from meshwright.assign.matching import heaviest_matching


def total(weights, columns):
    return sum(weights[row, column] for row, column in enumerate(columns) if column >= 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_matching_is_heavier(seed):
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 5, 2)
    weights = rng.normal(size=(rows, columns)).round(1)
    found = heaviest_matching(weights).tolist()
    pairs = [
        one for one in product(range(-1, columns), repeat=int(rows)) if len({*one} - {-1}) == sum(c >= 0 for c in one)
    ]
    assert tuple(found) in pairs
    assert total(weights, found) == pytest.approx(max(total(weights, one) for one in pairs))


def test_the_pair_of_the_greatest_weight_may_be_in_no_heaviest_matching():
    assert heaviest_matching(np.array([[3.0, 2.5], [2.5, 0.0]])).tolist() == [1, 0]


def test_weights_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="finite"):
        heaviest_matching(np.array([[np.nan]]))
