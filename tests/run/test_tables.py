"""Tables spread over real processes train as on one: whole, by rows, replicated; slices by columns have own states."""

import pytest

torch = pytest.importorskip("torch")

from meshwright.assign.tables import TableItem, place_tables  # noqa: E402
from meshwright.run.tables import EPSILON, DenseLayers, PlacedTables, Samples  # noqa: E402
from meshwright.spec.recommender import read_recommender  # noqa: E402
from tests.run.processes import launch_kept  # noqa: E402

SHAPE = {
    "dense_features": 3,
    "bottom_mlp": [6, 4],
    "embedding_dim": 4,
    "rows": [11, 7, 5, 9],
    "pooling": [3, 1, 2, 2],
    "interaction": "dot",
    "top_mlp": [8, 1],
}
CROSSED = SHAPE | {"interaction": "dcn", "cross_layers": 2, "cross_rank": 3}
BATCH, STEPS, LR = 8, 3, 0.05


def beginnings(shape):
    """The model with its layers and tables in float64, and the batches of some steps."""
    torch.manual_seed(0)
    model = read_recommender(shape)
    dense = DenseLayers(model).double()
    weights = [torch.randn(t.rows, t.dim, dtype=torch.float64) for t in model.tables]
    batches = [
        Samples(
            torch.randn(BATCH, 3, dtype=torch.float64),
            tuple(torch.randint(t.rows, (BATCH, int(t.pooling))) for t in model.tables),
            torch.randint(2, (BATCH,)).double(),
        )
        for _ in range(STEPS)
    ]
    return model, dense, weights, batches


def alone(shape):
    """Losses, tables and dense parameters of one process, by autograd through every lookup."""
    _, dense, tables, batches = beginnings(shape)
    states = [torch.zeros(len(table), dtype=torch.float64) for table in tables]
    squares = [torch.zeros_like(p) for p in dense.parameters()]
    losses = []
    for dense_in, rows, clicked in batches:
        for table in tables:
            table.requires_grad_().grad = None
        dense.zero_grad()
        pooled = torch.stack([table[index].sum(dim=1) for table, index in zip(tables, rows)], dim=1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(dense(dense_in, pooled), clicked)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for table, state in zip(tables, states):
                state += (table.grad**2).mean(dim=1)
                table -= LR * table.grad / (state.sqrt() + EPSILON)[:, None]
            for parameter, square in zip(dense.parameters(), squares):
                square += parameter.grad**2
                parameter -= LR * parameter.grad / (square.sqrt() + EPSILON)
    return losses, [t.detach() for t in tables], [p.detach() for p in dense.parameters()]


def spread(rank, ranks, shape, ways):
    """The same on one of several processes: losses, largest distances of tables and of dense parameters."""
    torch.set_num_threads(1)
    model, dense, weights, batches = beginnings(shape)
    items = [TableItem(way, parts, float(t.rows), float(t.rows)) for t, (way, parts) in zip(model.tables, ways)]
    placement = place_tables(items, ranks=ranks, tower=ranks, capacity=1e9)
    placed = PlacedTables(model, placement, weights, dense, rank, LR)
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses = [placed.step(Samples(b.dense[own], tuple(r[own] for r in b.rows), b.clicked[own])) for b in batches]
    wanted, tables, parameters = alone(shape)
    far = max(abs(a - b) for a, b in zip(losses, wanted))
    far_tables = [float((a - b).abs().max()) for a, b in zip(placed.gathered(), tables)]
    far_dense = max(float((a.detach() - b).abs().max()) for a, b in zip(dense.parameters(), parameters))
    return far, far_tables, far_dense


WHOLE, BY_ROW, ALIKE, CUT = ("table", 1), ("row", 1), ("data", 1), ("column", 2)


@pytest.mark.parametrize("shape", [SHAPE, CROSSED], ids=["dot", "dcn"])
@pytest.mark.parametrize(
    "ways",
    [[WHOLE] * 4, [BY_ROW] * 4, [ALIKE] * 4, [WHOLE, BY_ROW, ALIKE, WHOLE]],
    ids=["table", "row", "data", "mixed"],
)
def test_tables_on_two_processes_train_as_on_one(shape, ways):
    for far, tables, dense in launch_kept(2, spread, 2, shape, ways):
        assert max(far, dense, *tables) < 1e-12


def test_the_first_loss_with_columns_is_that_of_one_process_and_row_wise_states_are_not():
    """A slice has the mean square of its own columns, so that its second step is another one."""
    for far, tables, _ in launch_kept(2, spread, 2, SHAPE, [CUT, WHOLE, WHOLE, WHOLE]):
        assert 1e-9 < tables[0] < 0.5 and far < 0.1
