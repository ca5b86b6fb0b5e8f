"""Layers of graph networks on tensors, and the edges that each of them aggregates over.

Every edge of a file is taken both ways, and every vertex is a neighbour of its own. A layer sees rows of *sources*,
those of its own vertices first or among them, and makes rows of its own vertices: of the kinds that
:data:`meshwright.spec.graphs.LAYERS` names.
"""

from __future__ import annotations

from math import log, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.spec.edge_files import Edges
from meshwright.spec.graphs import GAT, GCN, GCNII, SAGE, GraphNetwork

#: Shares of GCNII: of the first layer in what is aggregated, and of its growing identity (Chen et al., 2020, arXiv
#: 2007.02133: alpha 0.1, lambda 0.5).
ALPHA, LAMBDA = 0.1, 0.5


class Messages(NamedTuple):
    """Edges [E] to some vertices: places of their sources and of their targets, the weight of each in a graph
    convolution and in a mean, and the number of targets."""

    source: Tensor
    target: Tensor
    weight: Tensor
    share: Tensor
    count: int


def both_ways(edges: Edges, vertices: int) -> Edges:
    """Return edges in both directions, with one from every vertex to itself."""
    own = np.arange(vertices)
    return Edges(
        np.concatenate([edges.heads, edges.tails, own]),
        np.concatenate([edges.tails, edges.heads, own]),
    )


def messages_to(directed: Edges, vertices: int, first: int, last: int, dtype: torch.dtype) -> Messages:
    """Return the edges to vertices from `first` to `last`, whose sources are numbered in the whole graph."""
    degree = np.bincount(directed.tails, minlength=vertices).astype(np.float64)
    mine = (directed.tails >= first) & (directed.tails < last)
    source, target = directed.heads[mine], directed.tails[mine]
    weight, share = 1 / np.sqrt(degree[source] * degree[target]), 1 / degree[target]
    return Messages(
        torch.from_numpy(source),
        torch.from_numpy(target - first),
        torch.from_numpy(weight).to(dtype),
        torch.from_numpy(share).to(dtype),
        last - first,
    )


class LayerWeights(nn.Module):
    """The parameters of one layer."""

    def __init__(self, model: GraphNetwork):
        super().__init__()
        hidden = model.hidden
        wide = 2 * hidden if model.layer == SAGE else hidden
        self.weight = nn.Parameter(torch.randn(wide, hidden) / sqrt(wide))
        self.bias = None if model.layer == GCNII else nn.Parameter(torch.zeros(hidden))
        if model.layer == GAT:
            self.source = nn.Parameter(torch.randn(hidden) / sqrt(hidden))
            self.target = nn.Parameter(torch.randn(hidden) / sqrt(hidden))


class NetworkWeights(nn.Module):
    """All parameters of a graph network, the same on every process for a seed."""

    def __init__(self, model: GraphNetwork, seed: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.front = nn.Linear(model.features, model.hidden)
        self.layers = nn.ModuleList(LayerWeights(model) for _ in range(model.layers))
        self.behind = nn.Linear(model.hidden, model.classes)
        self.to(dtype)


def summed(rows: Tensor, edges: Messages, weight: Tensor) -> Tensor:
    """Return the weighted sums of the rows of sources by target [count, ...]."""
    each = rows[edges.source] * weight.reshape(-1, *[1] * (rows.dim() - 1))
    return rows.new_zeros(edges.count, *rows.shape[1:]).index_add(0, edges.target, each)


def passed(
    model: GraphNetwork,
    weights: LayerWeights,
    number: int,
    sources: Tensor,
    own: Tensor,
    first: Tensor,
    edges: Messages,
) -> Tensor:
    """Return what a layer (its `number` from 0) makes of rows of sources [S, hidden], of its `own` vertices [count,
    hidden] and of what these had before the first layer."""
    if model.layer == GAT:
        return torch.relu(_attended(model, weights, sources, own, edges) + weights.bias)
    if model.layer == SAGE:
        both = torch.cat([own, summed(sources, edges, edges.share)], dim=1)
        return torch.relu(both @ weights.weight + weights.bias)
    gathered = summed(sources, edges, edges.weight)
    if model.layer == GCN:
        return torch.relu(gathered @ weights.weight + weights.bias)
    mixed, beta = (1 - ALPHA) * gathered + ALPHA * first, log(LAMBDA / (number + 1) + 1)
    return torch.relu((1 - beta) * mixed + beta * (mixed @ weights.weight))


def _attended(model: GraphNetwork, weights: LayerWeights, sources: Tensor, own: Tensor, edges: Messages) -> Tensor:
    """Attention of every head over the neighbours of each vertex."""
    wide = (-1, model.heads, model.hidden // model.heads)
    values, mine = (sources @ weights.weight).reshape(wide), (own @ weights.weight).reshape(wide)
    sent = (values * weights.source.reshape(wide)).sum(dim=2)
    asked = (mine * weights.target.reshape(wide)).sum(dim=2)
    scores = torch.nn.functional.leaky_relu(sent[edges.source] + asked[edges.target], 0.2)
    most = scores.detach().new_full((edges.count, model.heads), -torch.inf)
    most = most.scatter_reduce(0, edges.target[:, None].expand_as(scores), scores.detach(), "amax")
    grown = (scores - most[edges.target]).exp()
    total = grown.new_zeros(edges.count, model.heads).index_add(0, edges.target, grown)
    each = values[edges.source] * (grown / total[edges.target])[..., None]
    found = values.new_zeros(edges.count, *values.shape[1:]).index_add(0, edges.target, each)
    return found.reshape(edges.count, -1)
