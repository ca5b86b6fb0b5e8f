"""Training of vectors of nodes by buckets of edges, as the rounds of ``assign/buckets.py`` hand them to processes.

Every process keeps some partitions that nobody trains (number r and every so many further). A process that trains a
bucket is sent its partitions, with the state of their optimizer, and sends them back when its next bucket does not need
them, as PyTorch-BigGraph's partition servers have it (Lerer et al., 2019, arXiv 1903.12287). Buckets of a round have no
partition in common and negatives are drawn from a bucket's own, so that what is trained is what one process trains that
takes the buckets of each round one after the other. Vectors of relations are on every process, and what all have
changed in a round is added up behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softplus

from meshwright.assign.buckets import EdgeBucket, Round, Stay, needed, stays
from meshwright.run import launch
from meshwright.run.nodes.edges import SortedEdges, Walks, by_bucket
from meshwright.run.nodes.parts import DriveParts, NodePart, unpacked
from meshwright.run.world import add_up
from meshwright.spec.edge_files import Edges
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NodeEmbedding

#: Added to the root of AdaGrad's sums of squares.
EPSILON = 1e-10


class Hyper(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a training besides: the learning rate ``lr``, the ``seed`` of initial vectors, order and
    negatives, samples of a bucket in a pass (``episode``; 0: its edges), and the ``dtype`` of vectors."""

    lr: float = 0.025
    seed: int = 0
    episode: int = 0
    dtype: str = "float32"

    @property
    def torch(self) -> torch.dtype:
        """The type of numbers of vectors."""
        return torch.float64 if self.dtype == "float64" else torch.float32


class EdgeBatch(NamedTuple):
    """Rows in their partitions [B] of the ends of some edges, and rows of negatives that take the place of the tail,
    and of the head where both ends have some: [B, N] where every edge has its own, [chunks, U] where they share.
    ``relations`` [B] are those of edges, where they have some."""

    heads: Tensor
    tails: Tensor
    negatives: tuple[Tensor, ...]
    relations: Tensor | None = None


def random_of(*numbers: int) -> np.random.Generator:
    """A generator of its own for some numbers."""
    return np.random.default_rng(numbers)


def rows_in(nodes: int, partitions: int, part: int) -> int:
    """Return how many nodes a partition has."""
    return (nodes - part + partitions - 1) // partitions


def beginning(model: NodeEmbedding, work: EdgeSamples, hyper: Hyper, partitions: int, item: int) -> NodePart:
    """Return a partition as it is before any training: as long as the longest, uniform numbers of a dim-th."""
    rows = ceil(model.nodes / partitions)
    first = random_of(hyper.seed, 1, item).uniform(-0.5, 0.5, (rows, model.dim)) / model.dim
    kept = work.row_state + work.number_state * model.dim
    return NodePart(torch.from_numpy(first).to(hyper.torch), torch.zeros(rows, kept, dtype=hyper.torch))


def relations_at_first(model: NodeEmbedding, work: EdgeSamples, hyper: Hyper) -> NodePart:
    """Return vectors of relations as they are before any training: near one."""
    drawn = random_of(hyper.seed, 4).uniform(-0.5, 0.5, (model.relations, model.dim)) / model.dim
    kept = work.row_state + work.number_state * model.dim
    rows = torch.from_numpy(1.0 + drawn).to(hyper.torch)
    return NodePart(rows, torch.zeros(model.relations, kept, dtype=hyper.torch))


def batches_of(
    model: NodeEmbedding,
    work: EdgeSamples,
    hyper: Hyper,
    partitions: int,
    number: int,
    bucket: EdgeBucket,
    edges: Edges,
) -> list[EdgeBatch]:
    """Return the batches of a bucket in a pass: its edges in an order of their own, with negatives from its own
    partitions. Where edges share negatives, what is left of the last chunk is left out."""
    random = random_of(hyper.seed, 2, number, bucket.head, bucket.tail)
    order = random.permutation(len(edges.heads))
    sides = [bucket.tail, bucket.head][: model.sides]
    out = []
    for at in range(0, len(order), work.batch):
        some = order[at : at + work.batch]
        if work.shared > 1:
            some = some[: len(some) // work.shared * work.shared]
        if not len(some):
            continue
        count = len(some) // work.shared
        drawn = [random.integers(rows_in(model.nodes, partitions, side), size=(count, work.uniform)) for side in sides]
        negatives = tuple(torch.from_numpy(one) for one in drawn)
        kinds = None if edges.relations is None else torch.from_numpy(edges.relations[some])
        ends = (torch.from_numpy(edges.heads[some]), torch.from_numpy(edges.tails[some]))
        out.append(EdgeBatch(*ends, negatives, kinds))
    return out


def loss_of(
    heads: Tensor, tails: Tensor, negatives: tuple[Tensor, ...], shared: int, relations: Tensor | None = None
) -> Tensor:
    """Return the logistic loss of edges [B, dim] against negatives, summed over edges: [B, N, dim] of their own, or
    [chunks, U, dim] that chunks of so many edges have in common, beside the other ends of each other's edges. Vectors
    of relations [B, dim] multiply the end that is kept (DistMult, Yang et al., 2015, arXiv 1412.6575)."""
    asking = (heads, tails) if relations is None else (heads * relations, tails * relations)
    total = softplus(-(asking[0] * tails).sum(dim=-1)).sum()
    for own, other, drawn in zip(asking, (tails, heads), negatives):
        if shared == 1:
            total = total + softplus(torch.einsum("bd,bnd->bn", own, drawn)).sum()
            continue
        chunk, ends = (one.reshape(len(drawn), shared, -1) for one in (own, other))
        scores = torch.einsum("csd,cnd->csn", chunk, torch.cat([ends, drawn], dim=1))
        itself = torch.zeros(shared, scores.shape[2], dtype=torch.bool)
        itself[:, :shared].fill_diagonal_(True)
        total = total + softplus(scores.masked_fill(itself, -torch.inf)).sum()
    return total


def train_batch(
    head: NodePart, tail: NodePart, batch: EdgeBatch, work: EdgeSamples, hyper: Hyper, kinds: NodePart | None = None
) -> float:
    """Train on a batch of a bucket whose partitions these are (one object on the diagonal of one table), and the
    vectors of relations (`kinds`), in place; return its loss."""
    sides = (tail, head)[: len(batch.negatives)]
    places = [(head, batch.heads), (tail, batch.tails), *zip(sides, batch.negatives)]
    taken = [part.rows[rows].requires_grad_() for part, rows in places]
    count = len(taken)
    if kinds is not None:
        places.append((kinds, batch.relations))
        taken.append(kinds.rows[batch.relations].requires_grad_())
    loss = loss_of(taken[0], taken[1], tuple(taken[2:count]), work.shared, taken[count] if kinds is not None else None)
    loss.backward()
    parts = [head] + ([tail] if head is not tail else []) + ([kinds] if kinds is not None else [])
    for part in parts:
        mine = [
            (rows.reshape(-1), one.grad.reshape(-1, one.shape[-1]))
            for (p, rows), one in zip(places, taken)
            if p is part
        ]
        rows, place = torch.unique(torch.cat([r for r, _ in mine]), return_inverse=True)
        gradient = torch.cat([g for _, g in mine])
        summed = gradient.new_zeros(len(rows), gradient.shape[1]).index_add_(0, place, gradient)
        update(part, rows, summed, work, hyper.lr)
    return float(loss.detach())


def update(part: NodePart, rows: Tensor, gradient: Tensor, work: EdgeSamples, lr: float) -> None:
    """Move some rows against their summed gradients: plain, by row-wise AdaGrad or by AdaGrad."""
    if work.row_state:
        part.state[rows] += gradient.square().mean(dim=1, keepdim=True)
    elif work.number_state:
        part.state[rows] += gradient.square()
    step = gradient / (part.state[rows].sqrt() + EPSILON) if work.row_state or work.number_state else gradient
    part.rows[rows] -= lr * step


class Pools:
    """Samples of passes: the edges themselves, or pairs of walks, of which a thread makes those of the next pass while
    this one is trained."""

    def __init__(self, model: NodeEmbedding, work: EdgeSamples, hyper: Hyper, edges: Edges, partitions: int):
        self.hyper, self.partitions = hyper, partitions
        self.count = hyper.episode * partitions**2 or len(edges.heads)
        self.walks = Walks(edges, model.nodes, work.walk, work.augment) if work.walk else None
        self.stored = None if work.walk else by_bucket(edges, partitions, hyper.episode)
        self.thread = ThreadPoolExecutor(1) if work.walk else None
        self.ahead: Future[SortedEdges] | None = None

    def made(self, number: int) -> SortedEdges:
        """The pool of a pass."""
        pairs = self.walks.pairs(self.count, random_of(self.hyper.seed, 3, number))
        return by_bucket(pairs, self.partitions, self.hyper.episode)

    def of(self, number: int, last: bool) -> SortedEdges:
        """The pool of a pass, while the next one is begun unless it is the `last`."""
        if self.walks is None:
            return self.stored
        pool = self.made(number) if self.ahead is None else self.ahead.result()
        self.ahead = None if last else self.thread.submit(self.made, number + 1)
        return pool


class NodeTrainer:
    """The partitions of one process, and those it trains."""

    def __init__(
        self,
        model: NodeEmbedding,
        work: EdgeSamples,
        hyper: Hyper,
        rounds: tuple[Round, ...],
        partitions: int,
        edges: Edges,
        passes: int,
        rank: int,
        drives: str = "",
        ahead: bool = False,
    ):
        """`drives`: the folder for partitions that nobody trains ("": they stay in memory), of which one process reads
        those of its next bucket `ahead`."""
        self.model, self.work, self.hyper, self.partitions = model, work, hyper, partitions
        self.rounds, self.passes, self.rank, self.size = rounds, passes, rank, len(rounds[0])
        self.stays: dict[int, list[tuple[int, Stay]]] = {}
        for machine, mine in enumerate(stays(rounds * passes, partitions, model.context)):
            for stay in mine:
                self.stays.setdefault(stay.round, []).append((machine, stay))
        items = range(model.tables * partitions)
        self.kept = DriveParts(Path(drives) / f"rank-{rank}", model.dim) if drives else {}
        for item in items:
            if item % self.size == rank:
                self.kept[item] = beginning(model, work, hyper, partitions, item)
        if drives:
            self.kept.written_bytes = 0
        self.ahead = ahead and bool(drives) and self.size == 1
        self.mine: dict[int, NodePart] = {}
        self.kinds = relations_at_first(model, work, hyper) if model.relations else None
        self.pools = Pools(model, work, hyper, edges, partitions)
        self.moved_bytes = 0

    def train(self, ended: Callable[[int, float, int], Any] = lambda number, loss, samples: None) -> None:
        """Train all passes; `ended` is called behind each with its number, the loss a sample and the samples of it.
        Where a process is asked to stop, all end behind the pass, and partitions go back to where they are kept."""
        for number in range(self.passes):
            pool = self.pools.of(number, number + 1 == self.passes)
            told, last = torch.zeros(3, dtype=torch.float64), 0
            for place in range(len(self.rounds)):
                last = number * len(self.rounds) + place
                told[:2] += torch.tensor(self._round(number, last, pool), dtype=torch.float64)
            told[2] = float(launch.stop.requested)
            loss, samples, asked = add_up(told).tolist()
            ended(number, loss / max(1.0, samples), int(samples))
            if asked:
                self._return(last)
                return

    def _return(self, last: int) -> None:
        """Bring every partition back that is out behind the round `last`."""
        out: dict[int, int] = {}
        for at in range(last + 1):
            for machine, stay in self.stays.get(at, ()):
                out |= dict.fromkeys(stay.loads, machine)
                for item in stay.stores:
                    out.pop(item, None)
        for item, machine in sorted(out.items()):
            self._moved(item, item % self.size, machine, back=True)

    def _round(self, number: int, at: int, pool: SortedEdges) -> tuple[float, int]:
        """One round: partitions to whom they are for, training, and back. Return the loss and samples of this rank."""
        due = self.stays.get(at, [])
        for machine, stay in due:
            for item in stay.loads:
                self._moved(item, item % self.size, machine)
        if self.ahead:
            self.kept.begin(item for _, stay in self.stays.get(at + 1, ()) for item in stay.loads)
        loss, samples = 0.0, 0
        before = None if self.kinds is None else self.kinds.packed
        for _, stay in (one for one in due if one[0] == self.rank):
            wanted = sorted(needed(stay.bucket, self.partitions, self.model.context))
            head = self.mine[stay.bucket.head]
            tail = self.mine[stay.bucket.tail + self.partitions * self.model.context] if len(wanted) > 1 else head
            edges = pool.of(*stay.bucket, self.partitions)
            batches = batches_of(self.model, self.work, self.hyper, self.partitions, number, stay.bucket, edges)
            for batch in batches:
                loss += train_batch(head, tail, batch, self.work, self.hyper, self.kinds)
                samples += len(batch.heads)
        for machine, stay in due:
            for item in stay.stores:
                self._moved(item, item % self.size, machine, back=True)
        if before is not None:  # what all have changed in this round
            self.kinds = unpacked(before + add_up(self.kinds.packed - before), self.model.dim)
        return loss, samples

    def _moved(self, item: int, owner: int, machine: int, back: bool = False) -> None:
        """A partition from its owner to the machine that trains it, or back."""
        source, target = (machine, owner) if back else (owner, machine)
        there, here = (self.mine, self.kept) if back else (self.kept, self.mine)
        if source == target:
            if self.rank == source:
                here[item] = there.pop(item)
        elif self.rank == source:
            part = there.pop(item)
            packed = part.packed
            dist.send(packed, target)
            self.moved_bytes += packed.numel() * packed.element_size()
        elif self.rank == target:
            wide = self.model.dim + self.work.row_state + self.work.number_state * self.model.dim
            packed = torch.empty(ceil(self.model.nodes / self.partitions), wide, dtype=self.hyper.torch)
            dist.recv(packed, source)
            here[item] = unpacked(packed, self.model.dim)

    def gathered(self) -> list[Tensor] | None:
        """Every table [nodes, dim] on the first rank, behind the last round; None on others."""
        out = [torch.empty(self.model.nodes, self.model.dim, dtype=self.hyper.torch) for _ in range(self.model.tables)]
        for item in range(self.model.tables * self.partitions):
            owner, (table, part) = item % self.size, divmod(item, self.partitions)
            count = rows_in(self.model.nodes, self.partitions, part)
            rows = self.kept[item].rows[:count].contiguous() if owner == self.rank else None
            if owner and self.rank == owner:
                dist.send(rows, 0)
            elif self.rank == 0:
                if owner:
                    rows = torch.empty(count, self.model.dim, dtype=self.hyper.torch)
                    dist.recv(rows, owner)
                out[table][part :: self.partitions] = rows
        return out if self.rank == 0 else None
