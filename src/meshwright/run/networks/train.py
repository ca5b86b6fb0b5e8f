"""Training of graph networks on processes that divide vertices, or whose layers chunks of the graph pass.

Divided, every process has a block of vertices; before each layer it is sent those of others that its own are neighbours
of, and their gradients go back (graph parallelism). That is what one process computes. In a pipeline a process has some
layers and the graph; chunks pass in the order of a schedule. A neighbour outside of a chunk is what was last seen of
it, this epoch's where its chunk came before and the last one's where it comes later, and no gradient goes to it, as of
historical embeddings (GNNPipe, Chen et al., 2023, arXiv 2308.10087; GNNAutoScale, Fey et al., 2021, arXiv 2106.05609).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from meshwright import schedules
from meshwright.assign.cuts import blocks
from meshwright.lower.graph_network import layers_of
from meshwright.run.networks.layers import Messages, NetworkWeights, both_ways, messages_to, passed
from meshwright.run.world import add_up
from meshwright.schedules.actions import F
from meshwright.spec.edge_files import Edges
from meshwright.spec.graphs import GCNII, GraphNetwork


class GraphData(NamedTuple):
    """A graph: its edges, features [vertices, features] and classes [vertices] of vertices."""

    edges: Edges
    features: Tensor
    labels: Tensor


class Halo(NamedTuple):
    """The vertices that a process sends to each other one (places among its own) and how many it receives from each."""

    sends: tuple[Tensor, ...]
    counts: tuple[int, ...]


class _Exchanged(torch.autograd.Function):
    """Rows of others' vertices; backward their gradients, added up where they came from."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, halo: Halo, counted: list[int]) -> Tensor:
        ctx.halo, ctx.counted, ctx.rows = halo, counted, len(own)
        return _swapped([own[some] for some in halo.sends], list(halo.counts), own, counted)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        halo = ctx.halo
        back = _swapped(list(gradient.split(list(halo.counts))), [len(s) for s in halo.sends], gradient, ctx.counted)
        places = torch.cat(halo.sends)
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).index_add(0, places, back), None, None


def _swapped(out: list[Tensor], counts: list[int], like: Tensor, counted: list[int]) -> Tensor:
    """Rows to every process, and what every one sends."""
    found = like.new_empty(sum(counts), like.shape[1])
    if len(out) == 1:
        return found
    sent = torch.cat(out).contiguous()
    dist.all_to_all_single(found, sent, counts, [len(one) for one in out])
    counted[0] += sent.numel() * sent.element_size()
    return found


class NetworkTrainer:
    """The parts that processes of both kinds have: the model, its parameters with their optimizer, and bytes sent."""

    def __init__(self, model: GraphNetwork, data: GraphData, seed: int, lr: float):
        self.model, self.data = model, data
        self.weights = NetworkWeights(model, seed, data.features.dtype)
        self.directed = both_ways(data.edges, model.vertices)
        self.counted = [0]
        self.optimizer = torch.optim.Adam(self.weights.parameters(), lr=lr)

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The share of the mean loss over all vertices that some have."""
        return cross_entropy(self.weights.behind(rows), labels, reduction="sum") / self.model.vertices

    def messages(self, first: int, last: int) -> Messages:
        """Edges to a run of vertices."""
        return messages_to(self.directed, self.model.vertices, first, last, self.data.features.dtype)


def bounds(vertices: int, parts: int) -> list[int]:
    """Return where equal runs of vertices begin, and where the last one ends."""
    return [*np.searchsorted(blocks(vertices, parts), np.arange(parts)).tolist(), vertices]


class DividedNetwork(NetworkTrainer):
    """A block of vertices, on one of several processes."""

    def __init__(self, model: GraphNetwork, data: GraphData, seed: int, lr: float, rank: int, ranks: int):
        super().__init__(model, data, seed, lr)
        edge = bounds(model.vertices, ranks)
        self.own = slice(edge[rank], edge[rank + 1])
        part_of = blocks(model.vertices, ranks)
        heads, tails = self.directed.heads, self.directed.tails
        needs = [np.unique(heads[(part_of[tails] == to) & (part_of[heads] == rank)]) for to in range(ranks)]
        asked = [np.unique(heads[(part_of[tails] == rank) & (part_of[heads] == of)]) for of in range(ranks)]
        needs[rank], asked[rank] = needs[rank][:0], asked[rank][:0]
        sends = tuple(torch.from_numpy(one - edge[rank]) for one in needs)
        self.halo = Halo(sends, tuple(map(len, asked)))
        self.edges = self.messages(edge[rank], edge[rank + 1])
        place = np.full(model.vertices, -1)
        place[self.own] = np.arange(edge[rank + 1] - edge[rank])
        others = np.concatenate(asked)
        place[others] = np.arange(len(others)) + edge[rank + 1] - edge[rank]
        self.edges = self.edges._replace(source=torch.from_numpy(place)[self.edges.source])

    def epoch(self) -> float:
        """Train on the whole graph once; return the loss, the mean over all vertices."""
        rows = first = torch.relu(self.weights.front(self.data.features[self.own]))
        for number, weights in enumerate(self.weights.layers):
            sources = torch.cat([rows, _Exchanged.apply(rows, self.halo, self.counted)])
            rows = passed(self.model, weights, number, sources, rows, first, self.edges)
        loss = self.loss(rows, self.data.labels[self.own])
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.weights.parameters():
            add_up(parameter.grad)
        self.optimizer.step()
        return float(add_up(loss.detach().clone()))


class Passing(NamedTuple):
    """A chunk under way through a stage: what came in, and what went out (the loss behind the last layer)."""

    came: Tensor | None
    went: Tensor


class StageOfNetwork(NetworkTrainer):
    """Some layers, which chunks of the graph pass, on one of several processes (or all of them on one)."""

    def __init__(
        self,
        model: GraphNetwork,
        data: GraphData,
        seed: int,
        lr: float,
        rank: int,
        ranks: int,
        chunks: int,
        schedule: str,
    ):
        super().__init__(model, data, seed, lr)
        self.rank, self.ranks = rank, ranks
        before = layers_of(model, ranks)
        self.numbers = range(sum(before[:rank]), sum(before[: rank + 1]))
        edge = bounds(model.vertices, chunks)
        self.own = [slice(edge[c], edge[c + 1]) for c in range(chunks)]
        self.edges = [self.messages(edge[c], edge[c + 1]) for c in range(chunks)]
        self.seen = {number: data.features.new_zeros(model.vertices, model.hidden) for number in self.numbers}
        actions = schedules.build(schedule if ranks > 1 else "gpipe", ranks, chunks)
        mine = slice(int(actions.rank_ptr[rank]), int(actions.rank_ptr[rank + 1]))
        self.order = [(kind == F, int(chunk)) for kind, chunk in zip(actions.kind[mine], actions.microbatch[mine])]
        self.sending: list[Any] = []

    def epoch(self) -> float:
        """Train on the whole graph once; return the loss, the mean over all vertices."""
        self.optimizer.zero_grad()
        under_way: dict[int, Passing] = {}
        total = self.data.features.new_zeros(())
        for forward, chunk in self.order:
            if forward:
                under_way[chunk] = self._forward(chunk)
                if self.rank == self.ranks - 1:
                    total += under_way[chunk].went.detach()
            else:
                self._backward(under_way.pop(chunk))
        for handle, _ in self.sending:
            handle.wait()
        self.sending.clear()
        self.optimizer.step()
        if self.ranks > 1:
            dist.all_reduce(total)
        return float(total)

    def _forward(self, chunk: int) -> Passing:
        model, own = self.model, self.own[chunk]
        count, streams = own.stop - own.start, model.streams
        if self.rank == 0:
            came, rows = None, torch.relu(self.weights.front(self.data.features[own]))
            first = rows
        else:
            came = self.data.features.new_empty(count, streams * model.hidden)
            dist.recv(came, self.rank - 1)
            came.requires_grad_()
            rows, first = came[:, : model.hidden], came[:, -model.hidden :]
        places = torch.arange(own.start, own.stop)
        for number in self.numbers:
            sources = self.seen[number].index_copy(0, places, rows)
            self.seen[number][own] = rows.detach()
            rows = passed(model, self.weights.layers[number], number, sources, rows, first, self.edges[chunk])
        if self.rank == self.ranks - 1:
            return Passing(came, self.loss(rows, self.data.labels[own]))
        went = torch.cat([rows, first], dim=1) if model.layer == GCNII else rows
        self._send(went.detach(), self.rank + 1)
        return Passing(came, went)

    def _backward(self, one: Passing) -> None:
        if self.rank == self.ranks - 1:
            one.went.backward()
        else:
            gradient = torch.empty_like(one.went)
            dist.recv(gradient, self.rank + 1)
            one.went.backward(gradient)
        if one.came is not None:
            self._send(one.came.grad, self.rank - 1)

    def _send(self, rows: Tensor, to: int) -> None:
        rows = rows.contiguous()
        self.sending.append((dist.isend(rows, to), rows))  # kept until it has gone
        self.counted[0] += rows.numel() * rows.element_size()

    def kept(self) -> list[Tensor]:
        """The parameters that this process trains."""
        found = [p for number in self.numbers for p in self.weights.layers[number].parameters()]
        found += list(self.weights.front.parameters()) if self.rank == 0 else []
        return found + (list(self.weights.behind.parameters()) if self.rank == self.ranks - 1 else [])
