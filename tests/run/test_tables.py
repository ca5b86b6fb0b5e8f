"""Tables spread over real processes train as on one: whole, by rows, replicated; slices by columns have own states."""

import pytest

torch = pytest.importorskip("torch")

from meshwright.assign.tables import TableItem, place_tables  # noqa: E402
from meshwright.run.tables import TrainedTables  # noqa: E402
from meshwright.run.tables_apart import CROSSED, RATE, SHAPE, WAYS, beginning, furthest  # noqa: E402
from tests.run.processes import launch_kept  # noqa: E402


def found_on(ranks, shape, ways):
    """The results of every rank, as plain values."""
    return launch_kept(ranks, _plain, ranks, shape, ways)


def _plain(rank, ranks, shape, ways):
    torch.set_num_threads(1)
    return tuple(furthest(rank, ranks, shape, ways))


@pytest.mark.parametrize("shape", [SHAPE, CROSSED], ids=["dot", "dcn"])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_tables_on_two_processes_train_as_on_one(shape, ways):
    for losses, tables, dense in found_on(2, shape, ways):
        assert max(losses, dense, *tables) < 1e-12


def test_slices_by_columns_have_row_wise_states_of_their_own():
    """A slice has the mean square of its own columns, so that its first update is another one than whole rows'."""
    ways = [("column", 2), *[("table", 1)] * 3]
    for losses, tables, _ in found_on(2, SHAPE, ways):
        assert 1e-9 < tables[0] < 0.5 and losses < 0.1


def test_towers_are_refused():
    model, dense, tables, _ = beginning(SHAPE)
    placement = place_tables([TableItem("table", 1, 1.0, 1.0)] * 4, ranks=4, tower=2, capacity=1e9)
    with pytest.raises(ValueError, match="towers are priced and not run"):
        TrainedTables(model, placement, tables, dense, 0, RATE)
