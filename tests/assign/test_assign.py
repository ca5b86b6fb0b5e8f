"""Assignment: nothing lost, no bin over its capacity, bounds that no assignment beats (brute force on small cases)."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.assign import Problem, methods, solve
from meshwright.assign.first_fit import least_bins
from meshwright.errors import MeshwrightError

CAPACITY = 10
small = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=7)


def fewest(sizes: list[int]) -> int:
    """The fewest bins, by trying every assignment."""
    for bins in range(1, len(sizes) + 1):
        for where in product(range(bins), repeat=len(sizes)):
            if all(sum(s for s, b in zip(sizes, where) if b == i) <= CAPACITY for i in range(bins)):
                return bins
    raise AssertionError


def lightest(costs: list[int], bins: int) -> int:
    """The least that the costliest of so many bins can cost, by trying every assignment."""
    return min(
        max(sum(c for c, b in zip(costs, where) if b == i) for i in range(bins))
        for where in product(range(bins), repeat=len(costs))
    )


@settings(max_examples=40, deadline=None)
@given(small)
def test_first_fit_decreasing_is_within_its_guarantee_and_the_bound_below_the_best(sizes):
    found, best = solve("first-fit", Problem(sizes=np.array(sizes), capacity=CAPACITY)), fewest(sizes)
    filled = np.bincount(found.bin_of, weights=sizes, minlength=found.num_bins)
    assert len(found.bin_of) == len(sizes) and filled.max() <= CAPACITY and filled.min() > 0
    assert found.bound <= best <= found.value == found.num_bins
    assert found.num_bins <= 11 / 9 * best + 6 / 9  # Dosa 2007


@settings(max_examples=40, deadline=None)
@given(small, st.integers(1, 3))
def test_heaviest_first_is_within_four_thirds_and_the_bound_below_the_best(costs, bins):
    problem = Problem(sizes=np.ones(len(costs), np.int64), capacity=100, costs=np.array(costs, float), num_bins=bins)
    found, best = solve("heaviest-first", problem), lightest(costs, bins)
    load = np.bincount(found.bin_of, weights=costs, minlength=bins)
    assert found.value == load.max()
    assert found.bound <= best <= found.value <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9  # Graham 1969


def test_first_fit_fills_the_first_bin_that_has_room():
    # by hand, bins of 10: 7 | 6 | 5 -> third, 4 -> second (6 + 4), 3 -> first (7 + 3), 2 -> third (5 + 2)
    found = solve("first-fit", Problem(sizes=np.array([2, 3, 4, 5, 6, 7]), capacity=10))
    assert found.bin_of.tolist() == [2, 0, 1, 2, 1, 0]
    assert (found.num_bins, found.bound, found.gap) == (3, 3, 0.0)


def test_the_bound_counts_large_items_that_cannot_share():
    # three of 6 need a bin each though they fill less than two; with two of 5 beside them, one bin more
    assert least_bins(np.array([6, 6, 6]), 10) == 3
    assert least_bins(np.array([6, 6, 6, 5, 5]), 10) == 4
    assert least_bins(np.array([], np.int64), 10) == 0


def test_what_has_no_room_is_in_no_bin():
    found = solve("heaviest-first", Problem(sizes=np.array([6, 6, 6]), capacity=10, num_bins=2))
    assert sorted(found.bin_of.tolist()) == [-1, 0, 1]
    few = solve("first-fit", Problem(sizes=np.array([6, 6, 4]), capacity=10, num_bins=1))
    assert few.bin_of.tolist() == [0, -1, 0]


def test_wrong_problems_and_names_are_refused():
    assert sorted(methods()) == ["first-fit", "heaviest-first"]
    with pytest.raises(MeshwrightError, match="no method 'first'"):
        solve("first", Problem(sizes=np.array([1]), capacity=1))
    with pytest.raises(ValueError, match="from 1 to the capacity"):
        solve("first-fit", Problem(sizes=np.array([0, 3]), capacity=2))
    with pytest.raises(ValueError, match="0 or more"):
        solve("heaviest-first", Problem(sizes=np.array([1]), capacity=2, costs=np.array([np.nan]), num_bins=1))
    with pytest.raises(ValueError, match="over a number of bins"):
        solve("heaviest-first", Problem(sizes=np.array([1]), capacity=2))
