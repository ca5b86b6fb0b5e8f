"""Tables spread over real processes, held against one process that differentiates through every lookup."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from meshwright.assign.tables import TableItem, place_tables
from meshwright.run import launch
from meshwright.run.tables import EPSILON, DenseLayers, Samples, TrainedTables
from meshwright.run.world import World
from meshwright.spec.recommender import Recommender, read_recommender

#: A small model, and the same with cross layers.
SHAPE: dict[str, Any] = {
    "dense_features": 3,
    "bottom_mlp": [6, 4],
    "embedding_dim": 4,
    "rows": [11, 7, 5, 9],
    "pooling": [3, 1, 2, 2],
    "interaction": "dot",
    "top_mlp": [8, 1],
}
CROSSED = SHAPE | {"interaction": "dcn", "cross_layers": 2, "cross_rank": 3}
BATCH, STEPS, RATE = 8, 3, 0.05
#: The way of each table and its slices by columns, by a name.
WAYS: dict[str, list[tuple[str, int]]] = {
    "table": [("table", 1)] * 4,
    "row": [("row", 1)] * 4,
    "data": [("data", 1)] * 4,
    "mixed": [("table", 1), ("row", 1), ("data", 1), ("table", 1)],
}


class Beginning(NamedTuple):
    """A model, its layers and whole tables in float64, and the batches of some steps."""

    model: Recommender
    dense: DenseLayers
    tables: list[Tensor]
    batches: list[Samples]


class Furthest(NamedTuple):
    """Largest differences from one process after some steps: of losses, of each table, of dense layers."""

    losses: float
    tables: list[float]
    dense: float


def beginning(shape: dict[str, Any]) -> Beginning:
    """Return the same numbers every time."""
    torch.manual_seed(0)
    model = read_recommender(shape)
    dense = DenseLayers(model).double()
    tables = [torch.randn(t.rows, t.dim, dtype=torch.float64) for t in model.tables]
    batches = [
        Samples(
            torch.randn(BATCH, model.dense_features, dtype=torch.float64),
            tuple(torch.randint(t.rows, (BATCH, int(t.pooling))) for t in model.tables),
            torch.randint(2, (BATCH,)).double(),
        )
        for _ in range(STEPS)
    ]
    return Beginning(model, dense, tables, batches)


def alone(shape: dict[str, Any]) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Return the losses, the tables and the dense parameters of one process, by autograd through every lookup."""
    _, dense, tables, batches = beginning(shape)
    states = [torch.zeros(len(table), dtype=torch.float64) for table in tables]
    squares = [torch.zeros_like(p) for p in dense.parameters()]
    losses = []
    for inputs, rows, clicked in batches:
        for table in tables:
            table.requires_grad_().grad = None
        dense.zero_grad()
        pooled = torch.stack([table[index].sum(dim=1) for table, index in zip(tables, rows)], dim=1)
        loss = binary_cross_entropy_with_logits(dense(inputs, pooled), clicked)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for table, state in zip(tables, states):
                state += (table.grad**2).mean(dim=1)
                table -= RATE * table.grad / (state.sqrt() + EPSILON)[:, None]
            for parameter, square in zip(dense.parameters(), squares):
                square += parameter.grad**2
                parameter -= RATE * parameter.grad / (square.sqrt() + EPSILON)
    return losses, [t.detach() for t in tables], [p.detach() for p in dense.parameters()]


def furthest(rank: int, ranks: int, shape: dict[str, Any], ways: list[tuple[str, int]]) -> Furthest:
    """Train on this rank of a group, and return how far that is from one process."""
    model, dense, tables, batches = beginning(shape)
    items = [TableItem(way, parts, float(t.rows), float(t.rows)) for t, (way, parts) in zip(model.tables, ways)]
    placement = place_tables(items, ranks=ranks, tower=ranks, capacity=1e9)
    placed = TrainedTables(model, placement, tables, dense, rank, RATE)
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses = [placed.step(Samples(b.dense[own], tuple(r[own] for r in b.rows), b.clicked[own])) for b in batches]
    wanted, whole, parameters = alone(shape)
    return Furthest(
        max(abs(a - b) for a, b in zip(losses, wanted)),
        [float((a - b).abs().max()) for a, b in zip(placed.gathered(), whole)],
        max(float((a.detach() - b).abs().max()) for a, b in zip(dense.parameters(), parameters)),
    )


def apart(ranks: int = 2) -> dict[str, float]:
    """Return for every way of :data:`WAYS` the largest difference from one process, on any of so many ranks.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    return launch.start(_compare, num_ranks=ranks, device="cpu", timeout_s=60.0)


def _compare(world: World) -> dict[str, float]:
    found = {}
    for name, ways in WAYS.items():
        far = [furthest(world.rank, world.size, shape, ways) for shape in (SHAPE, CROSSED)]
        found[name] = max(max(one.losses, one.dense, *one.tables) for one in far)
    most = torch.nan_to_num(torch.tensor(list(found.values()), dtype=torch.float64), nan=1e300, posinf=1e300)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist()))
