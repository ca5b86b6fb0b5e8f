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
    assert sorted(methods()) == ["enumerate", "first-fit", "heaviest-first", "ilp", "in-order", "local-search"]
    with pytest.raises(MeshwrightError, match="no method 'first'"):
        solve("first", Problem(sizes=np.array([1]), capacity=1))
    with pytest.raises(ValueError, match="from 1 to the capacity"):
        solve("first-fit", Problem(sizes=np.array([0, 3]), capacity=2))
    with pytest.raises(ValueError, match="0 or more"):
        solve("heaviest-first", Problem(sizes=np.array([1]), capacity=2, costs=np.array([np.nan]), num_bins=1))
    with pytest.raises(ValueError, match="over a number of bins"):
        solve("heaviest-first", Problem(sizes=np.array([1]), capacity=2))
    both = Problem(sizes=np.array([3]), capacity=np.array([2]), num_bins=2, start=np.zeros(3))
    with pytest.raises(ValueError, match=r"these from 3 to 3; 1 capacities for 2 bins; 3 starts for 2 bins"):
        solve("enumerate", both)


def made(seed: int) -> Problem:
    """A problem of unequal bins whose every assignment can be tried."""
    rng = np.random.default_rng(seed)
    items, bins = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    sizes, room = rng.integers(1, 6, items), rng.integers(5, 12, bins)
    costs = rng.integers(1, 20, (items, bins)).astype(float)
    return Problem(sizes=sizes, capacity=room, costs=costs, num_bins=bins, start=rng.integers(0, 5, bins).astype(float))


def best_of(problem: Problem) -> float:
    """The least that the costliest bin can cost where all items have room, by trying every assignment."""
    least = np.inf
    for where in product(range(problem.num_bins), repeat=len(problem.sizes)):
        held, load = np.zeros(problem.num_bins), problem.before
        for item, one in enumerate(where):
            held[one] += problem.sizes[item]
            load[one] += problem.each[item, one]
        if (held <= problem.room).all():
            least = min(least, load.max())
    return least


@pytest.mark.parametrize("name", ["enumerate", "ilp", "local-search", "heaviest-first", "in-order"])
def test_methods_keep_capacities_and_bounds_and_the_exact_ones_find_the_best(name):
    if name == "ilp":
        pytest.importorskip("highspy")
    solved = 0
    for seed in range(40):
        problem = made(seed)
        found, best = solve(name, problem), best_of(problem)
        has = found.bin_of >= 0
        held = np.bincount(found.bin_of[has], weights=problem.sizes[has], minlength=problem.num_bins)
        assert (held <= problem.room).all() and found.bound <= found.value
        if np.isfinite(best) and has.all():
            solved += 1
            assert found.bound - 1e-9 <= best <= found.value + 1e-9
            if name in ("enumerate", "ilp"):
                assert (found.value, found.gap) == (pytest.approx(best), pytest.approx(0.0, abs=1e-6))
        elif name in ("enumerate", "ilp"):
            assert not np.isfinite(best)  # what they leave out has no room in any assignment
    assert solved > 25


def test_the_costliest_first_is_bettered_by_a_swap():
    # Graham's example for 2 bins: 3 3 2 2 2 are laid 3+2+2 and 3+2, and 3+3 beside 2+2+2 is 6 each
    problem = Problem(sizes=np.ones(5, np.int64), capacity=9, costs=np.array([3.0, 3, 2, 2, 2]), num_bins=2)
    assert solve("heaviest-first", problem).value == 7
    found = solve("local-search", problem)
    assert (found.value, found.bound, found.gap) == (6, 6, 0)


def test_bins_in_order_take_consecutive_items():
    # by hand: 1 2 3 4 5 over 3 bins is 6 | 4 | 5, or 3 | 3 + ... no split has a costliest bin below 6
    problem = Problem(sizes=np.ones(5, np.int64), capacity=5, costs=np.arange(1.0, 6.0), num_bins=3)
    found = solve("in-order", problem)
    assert found.value == 6 and (np.diff(found.bin_of) >= 0).all()


def test_an_unfinished_enumeration_says_its_gap(monkeypatch):
    from meshwright.assign import enumeration

    monkeypatch.setattr(enumeration, "MOST_STEPS", 50)
    costs = np.random.default_rng(3).integers(50, 100, 24).astype(float)
    found = solve("enumerate", Problem(sizes=np.ones(24, np.int64), capacity=24, costs=costs, num_bins=5))
    assert found.value > found.bound >= costs.sum() / 5
