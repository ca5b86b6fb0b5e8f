"""Graph networks on real processes, held against one process.

Where vertices are divided the one process has the whole graph as a dense matrix; where chunks pass a pipeline it has
all layers and passes the chunks one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run import launch
from meshwright.run.networks.layers import ALPHA, LAMBDA, NetworkWeights, both_ways
from meshwright.run.networks.train import DividedNetwork, GraphData, StageOfNetwork
from meshwright.run.nodes.train import random_of
from meshwright.run.world import World
from meshwright.spec.edge_files import Edges
from meshwright.spec.graphs import GAT, GCN, GCNII, LAYERS, SAGE, GraphNetwork

#: A small graph, how long it is trained, and the seed and rate of that.
VERTICES, EDGES, EPOCHS, SEED, RATE = 23, 60, 3, 5, 0.01
SHAPE: dict[str, Any] = {
    "vertices": VERTICES,
    "edges": 2 * EDGES,
    "features": 5,
    "classes": 3,
    "hidden": 8,
    "layers": 4,
}
#: Chunks of a pipeline and schedules of it.
CHUNKS, SCHEDULES = 4, ("gpipe", "1f1b")


def graph(layer: str) -> tuple[GraphNetwork, GraphData]:
    """Return the same graph every time."""
    random = random_of(11)
    model = GraphNetwork(name="small", layer=layer, heads=2, **SHAPE)
    edges = Edges(random.integers(VERTICES, size=EDGES), random.integers(VERTICES, size=EDGES))
    features = torch.from_numpy(random.standard_normal((VERTICES, model.features)))
    return model, GraphData(edges, features, torch.from_numpy(random.integers(model.classes, size=VERTICES)))


def alone(layer: str) -> tuple[list[float], list[Tensor]]:
    """Return the losses and parameters of one process that has the whole graph as a matrix."""
    model, data = graph(layer)
    heads, tails, _ = both_ways(data.edges, VERTICES)
    near = torch.zeros(VERTICES, VERTICES, dtype=torch.float64)
    near.index_put_((torch.from_numpy(tails), torch.from_numpy(heads)), near.new_ones(len(heads)), accumulate=True)
    degree = near.sum(dim=1)
    weights = NetworkWeights(model, SEED, torch.float64)
    optimizer = torch.optim.Adam(weights.parameters(), lr=RATE)
    losses = []
    for _ in range(EPOCHS):
        rows = first = torch.relu(weights.front(data.features))
        for number, layer_weights in enumerate(weights.layers):
            rows = _dense(model, layer_weights, number, near, degree, rows, first)
        loss = torch.nn.functional.cross_entropy(weights.behind(rows), data.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in weights.parameters()]


def _dense(model: GraphNetwork, weights: Any, number: int, near: Tensor, degree: Tensor, rows: Tensor, first: Tensor):
    """A layer by dense matrices of the whole graph."""
    if model.layer == SAGE:
        mean = near / degree[:, None] @ rows
        return torch.relu(torch.cat([rows, mean], dim=1) @ weights.weight + weights.bias)
    if model.layer == GAT:
        out, wide = [], model.hidden // model.heads
        for head in range(model.heads):
            mine = slice(head * wide, (head + 1) * wide)
            values = rows @ weights.weight[:, mine]
            scores = (values @ weights.target[mine])[:, None] + (values @ weights.source[mine])[None]
            grown = near * torch.nn.functional.leaky_relu(scores, 0.2).exp()  # as often as there are edges
            out.append(grown / grown.sum(dim=1, keepdim=True) @ values)
        return torch.relu(torch.cat(out, dim=1) + weights.bias)
    gathered = near / (degree[:, None] * degree[None]).sqrt() @ rows
    if model.layer == GCN:
        return torch.relu(gathered @ weights.weight + weights.bias)
    beta = torch.log(torch.tensor(LAMBDA / (number + 1) + 1, dtype=torch.float64))
    mixed = (1 - ALPHA) * gathered + ALPHA * first
    return torch.relu((1 - beta) * mixed + beta * (mixed @ weights.weight))


def divided_far(layer: str, rank: int, ranks: int) -> float:
    """Return how far losses and parameters are from one process where vertices are divided."""
    model, data = graph(layer)
    trainer = DividedNetwork(model, data, SEED, RATE, rank, ranks)
    losses = [trainer.epoch() for _ in range(EPOCHS)]
    wanted, parameters = alone(layer)
    far = [float((a.detach() - b).abs().max()) for a, b in zip(trainer.weights.parameters(), parameters)]
    return max(*far, *(abs(a - b) for a, b in zip(losses, wanted)))


def piped_far(layer: str, schedule: str, rank: int, ranks: int) -> float:
    """Return how far losses and parameters of this stage are from one process that passes the chunks alone."""
    model, data = graph(layer)
    trainer = StageOfNetwork(model, data, SEED, RATE, rank, ranks, CHUNKS, schedule)
    losses = [trainer.epoch() for _ in range(EPOCHS)]
    one = StageOfNetwork(model, data, SEED, RATE, 0, 1, CHUNKS, schedule)
    wanted = [one.epoch() for _ in range(EPOCHS)]
    one.numbers, one.rank, one.ranks = trainer.numbers, rank, ranks  # its parameters of this stage
    far = [float((a - b).detach().abs().max()) for a, b in zip(trainer.kept(), one.kept())]
    return max(*far, *(abs(a - b) for a, b in zip(losses, wanted)))


def apart(ranks: int = 2) -> dict[str, float]:
    """Return for every kind of layers, divided and in a pipeline, the largest difference from one process.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    return launch.start(_compare, num_ranks=ranks, device="cpu", timeout_s=60.0)


def _compare(world: World) -> dict[str, float]:
    found = {f"{layer}, vertices divided": divided_far(layer, world.rank, world.size) for layer in LAYERS}
    for layer, schedule in ((GCN, "gpipe"), (GCNII, "1f1b")):
        found[f"{layer}, chunks by {schedule}"] = piped_far(layer, schedule, world.rank, world.size)
    most = torch.nan_to_num(torch.tensor(list(found.values()), dtype=torch.float64), nan=1e300, posinf=1e300)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist()))
