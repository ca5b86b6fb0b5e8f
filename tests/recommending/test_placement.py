"""Tables on ranks: the best placement by trying all, room on every rank, bounds that none gets below."""

from itertools import product

import numpy as np
import pytest

from meshwright.assign.tables import TableItem, place_tables

COSTS = [9.0, 7.0, 6.0, 5.0, 5.0, 4.0, 2.0]
SIZES = [30.0, 10.0, 20.0, 10.0, 40.0, 10.0, 10.0]
ITEMS = [TableItem("table", 1, size, cost) for size, cost in zip(SIZES, COSTS)]


def best_of_all(room):
    """The least cost of the busiest of three ranks with so much room each, over all 3**7 placements."""
    best = np.inf
    for where in product(range(3), repeat=len(ITEMS)):
        held, load = np.zeros(3), np.zeros(3)
        np.add.at(held, list(where), SIZES)
        np.add.at(load, list(where), COSTS)
        if held.max() <= room:
            best = min(best, load.max())
    return best


@pytest.mark.parametrize("room", [130.0, 60.0, 50.0])
def test_the_integer_program_finds_the_best_of_all_placements_with_room(room):
    pytest.importorskip("highspy")
    found = place_tables(ITEMS, ranks=3, tower=3, capacity=room, method="ilp")
    assert not found.crowded and found.busiest == pytest.approx(best_of_all(room))
    held = np.zeros(3)
    for size, (rank,) in zip(SIZES, found.rank_of):
        held[rank] += size
    assert held.max() <= room


@pytest.mark.parametrize("method", ["heaviest-first", "local-search"])
def test_faster_methods_are_between_the_best_and_four_thirds_of_it(method):
    """Graham (1969): the longest first, onto equal ranks, is at most 4/3 of the best."""
    found = place_tables(ITEMS, ranks=3, tower=3, capacity=1e9, method=method)
    best = best_of_all(1e9)
    assert found.bound <= best <= found.busiest <= 4 / 3 * best


def test_no_room_is_said_and_tables_are_placed_all_the_same():
    found = place_tables(ITEMS, ranks=3, tower=3, capacity=35.0)
    assert found.crowded and all(found.rank_of)
    assert place_tables(ITEMS, ranks=3, tower=3, capacity=1e9).crowded is False


def test_slices_rows_and_replicas_lie_where_they_say():
    items = [TableItem("column", 4, 40.0, 8.0), TableItem("row", 1, 40.0, 4.0), TableItem("data", 1, 4.0, 1.0)]
    found = place_tables(items, ranks=4, tower=4, capacity=100.0)
    assert sorted(found.rank_of[0]) == [0, 1, 2, 3] and found.ranks(1) == found.ranks(2) == (0, 1, 2, 3)
    assert found.busiest == found.bound == 8 / 4 + 4 / 4 and found.gap == 0.0


def test_a_tower_keeps_its_tables_on_its_own_ranks():
    found = place_tables([*ITEMS, TableItem("row", 1, 8.0, 8.0)], ranks=4, tower=2, capacity=1e9)
    for table, tower in enumerate(found.tower_of):
        assert {rank // 2 for rank in found.ranks(table)} == {tower}
    assert {*found.tower_of} == {0, 1} and found.bound <= found.busiest
    with pytest.raises(ValueError, match="towers of 3"):
        place_tables(ITEMS, ranks=4, tower=3, capacity=1e9)
