"""Vectors of nodes trained by buckets on real processes, held against one process with whole tables.

The one process knows no partitions: it has tables of all nodes, takes the batches of each round's buckets one after the
other, and differentiates through the lookups of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.assign.buckets import Round, grid, locked, tournament
from meshwright.run import launch
from meshwright.run.nodes.train import (
    EPSILON,
    Hyper,
    NodeTrainer,
    Pools,
    batches_of,
    beginning,
    random_of,
    relations_at_first,
)
from meshwright.run.world import World
from meshwright.spec.edge_files import Edges
from meshwright.spec.edge_samples import EdgeSamples, parse_edge_samples
from meshwright.spec.graphs import NodeEmbedding

#: A small graph, and how long it is trained.
NODES, EDGES, DIM, PASSES = 41, 600, 6, 2
HYPER = Hyper(lr=0.05, seed=3, dtype="float64")


class Trained(NamedTuple):
    """A way of training: its partitions, who hands out buckets, whether there is a context, and its workload."""

    partitions: int
    rounds: Callable[[int, int], tuple[Round, ...]]
    context: bool
    train: str
    relations: int = 0


#: Ways that are held against one process, by a name.
WAYS = {
    "lock server, one table, shared negatives": Trained(
        4, locked, False, "batch=20,negatives=8,shared=4,optimizer=rowwise-adagrad"
    ),
    "lock server, one table, negatives of its own": Trained(5, locked, False, "batch=16,negatives=3"),
    "tournament, one table, negatives of its own": Trained(
        8, tournament, False, "batch=16,negatives=2,optimizer=adagrad"
    ),
    "lock server, one table, three relations": Trained(
        4, locked, False, "batch=20,negatives=6,shared=4,optimizer=rowwise-adagrad", 3
    ),
    "grid, two tables, walks": Trained(4, grid, True, "batch=32,negatives=2,walk=6,augment=2,optimizer=adagrad"),
}


def graph(context: bool, relations: int = 0) -> tuple[NodeEmbedding, Edges]:
    """Return the same graph every time."""
    random = random_of(7)
    model = NodeEmbedding(name="small", nodes=NODES, edges=EDGES, dim=DIM, context=context, relations=relations)
    heads, tails = random.integers(NODES, size=EDGES), random.integers(NODES, size=EDGES)
    return model, Edges(heads, tails, random.integers(relations, size=EDGES) if relations else None)


def rounds_for(way: Trained, ranks: int) -> tuple[Round, ...]:
    """Return the rounds of a pass on so many processes."""
    return way.rounds(way.partitions, ranks)


def alone(
    model: NodeEmbedding, work: EdgeSamples, edges: Edges, rounds: tuple[Round, ...], partitions: int, passes: int
) -> tuple[list[float], list[Tensor]]:
    """Return the loss a sample of every pass and the tables of one process that has all of both."""
    tables, states = [], []
    for table in range(model.tables):
        rows = torch.empty(model.nodes, model.dim, dtype=HYPER.torch)
        for part in range(partitions):
            first = beginning(model, work, HYPER, partitions, table * partitions + part).rows
            rows[part::partitions] = first[: len(rows[part::partitions])]
        tables.append(rows)
        states.append(torch.zeros(model.nodes, 1 if work.row_state else model.dim, dtype=HYPER.torch))
    at_first = relations_at_first(model, work, HYPER)
    kinds = [at_first.rows, torch.zeros(len(at_first.rows), states[0].shape[1], dtype=HYPER.torch)]
    pools, losses = Pools(model, work, HYPER, edges, partitions), []
    for number in range(passes):
        total, samples = 0.0, 0
        pool = pools.of(number, number + 1 == passes)
        for one in rounds:
            begin, changed = [list(map(Tensor.clone, kinds)) for _ in range(2)]
            for bucket in (bucket for bucket in one if bucket is not None):
                mine = pool.of(*bucket, partitions)
                own = [begin[0].clone(), begin[1].clone()]  # relations as they are when the round begins
                for batch in batches_of(model, work, HYPER, partitions, number, bucket, mine):
                    total += _step(model, work, [*tables, own[0]], [*states, own[1]], partitions, bucket, batch)
                    samples += len(batch.heads)
                changed = [c + (o.detach() - b) for c, o, b in zip(changed, own, begin)]
            kinds = changed
        losses.append(total / samples)
    return losses, tables


def _step(model, work, tables, states, partitions, bucket, batch) -> float:
    """One batch by autograd through whole tables, edge by edge and negative by negative."""
    for table in tables:
        table.requires_grad_().grad = None
    first, second, kinds = tables[0], tables[-2], tables[-1]
    heads, tails = batch.heads * partitions + bucket.head, batch.tails * partitions + bucket.tail
    each = kinds[batch.relations] if model.relations else torch.ones(len(heads), model.dim, dtype=HYPER.torch)
    loss = -torch.nn.functional.logsigmoid((first[heads] * each * second[tails]).sum(1)).sum()
    ends = [(first, heads, second, tails, bucket.tail), (second, tails, first, heads, bucket.head)]
    for (own, mine, others, theirs, part), drawn in zip(ends, batch.negatives):
        wrong = (drawn * partitions + part).tolist()
        for place in range(len(mine)):
            against = list(wrong[place // work.shared])
            if work.shared > 1:
                chunk = range(place // work.shared * work.shared, (place // work.shared + 1) * work.shared)
                against += [int(theirs[other]) for other in chunk if other != place]
            scores = others[against] @ (own[mine[place]] * each[place])
            loss = loss - torch.nn.functional.logsigmoid(-scores).sum()
    loss.backward()
    with torch.no_grad():
        for table, state in zip(tables, states):
            if table.grad is None:
                continue
            if work.row_state:
                state += table.grad.square().mean(dim=1, keepdim=True)
            elif work.number_state:
                state += table.grad.square()
            scaled = table.grad / (state.sqrt() + EPSILON) if work.row_state or work.number_state else table.grad
            table -= HYPER.lr * scaled
    return float(loss.detach())


def furthest(rank: int, ranks: int, way: Trained) -> float:
    """Train on this rank of a group, and return how far losses and vectors are from one process (0 but on the first
    rank)."""
    model, edges = graph(way.context, way.relations)
    work, rounds = parse_edge_samples(way.train), rounds_for(way, ranks)
    trainer = NodeTrainer(model, work, HYPER, rounds, way.partitions, edges, PASSES, rank)
    losses: list[float] = []
    trainer.train(lambda number, loss, samples: losses.append(loss))
    found = trainer.gathered()
    if found is None:
        return 0.0
    wanted, tables = alone(model, work, edges, rounds, way.partitions, PASSES)
    far = [float((a - b.detach()).abs().max()) for a, b in zip(found, tables)]
    return max(*far, *(abs(a - b) for a, b in zip(losses, wanted)))


def apart(ranks: int = 2) -> dict[str, float]:
    """Return for every way of :data:`WAYS` the largest difference from one process.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    return launch.start(_compare, num_ranks=ranks, device="cpu", timeout_s=60.0)


def _compare(world: World) -> dict[str, float]:
    found = {name: furthest(world.rank, world.size, way) for name, way in WAYS.items()}
    most = torch.nan_to_num(torch.tensor(list(found.values()), dtype=torch.float64), nan=1e300, posinf=1e300)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist()))
