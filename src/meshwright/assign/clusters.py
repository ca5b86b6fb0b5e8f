"""Experts into clusters of even load, and clusters onto ranks: the two problems of MoETuner, solved exactly.

MoETuner (Go and Mahajan, 2025, arXiv 2502.06643) places the experts of a mixture by two integer programs: experts into
clusters, so that the busiest of a layer has few tokens, and clusters onto devices, so that tokens travel little from
layer to layer. The first is solved as such, layer by layer, while it is small. The second is a shortest path: two
layers whose clusters are divided among nodes keep the most tokens on ranks by an assignment within each node, whatever
the other layers do, so that a layer's state is which clusters are on which node, and dynamic programming over layers
finds the best. Within one node there is one state, and any number of ranks is exact. No limit is in seconds: every
process of a run places experts by itself and has to find the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from math import comb, factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Problem, assigned, program
from meshwright.assign.integer import solve
from meshwright.assign.transport import transported

#: What a token costs that stays on its rank, goes to another of its node, or to another node. A network's port of a
#: device has about a ninth of NVLink's bandwidth (450 GB/s against 50 of an H100's node).
HERE, NEAR, FAR = 0.0, 1.0, 9.0
#: Columns of all programs of clusters up to which they are solved, and nodes of the search that each of them has.
MOST_COLUMNS, NODES = 1100, 50
#: Ways to divide clusters among nodes up to which paths are searched, and assignments that are solved for one.
MOST_STATES, MOST_ASSIGNMENTS = 100, 4000
#: Ranks of a node up to which all orders of them are tried at once.
ORDERS_TRIED = 4


class Clusters(NamedTuple):
    """``of`` int64 [layers, experts], the ``bound`` float64 [layers] that no busiest cluster gets below, and whether
    programs were ``solved``."""

    of: NDArray[np.int64]
    bound: NDArray[np.float64]
    solved: bool


def clustered(loads: NDArray[np.float64], of: NDArray[np.int64], ranks: int) -> Clusters:
    """Return clusters of the least busiest load in every layer, or those of the steps, `of` int64 [layers, experts],
    where a bound proves them the best, the programs of `loads` [layers, experts] are too large together, or the solver
    is not installed."""
    layers, experts = loads.shape
    slots, found, bound = experts // ranks, of.copy(), np.zeros(layers)
    left = []
    for layer, each in enumerate(loads):
        problem = Problem(sizes=np.ones(experts, np.int64), capacity=slots, costs=each, num_bins=ranks)
        steps = assigned(problem, of[layer])
        bound[layer] = steps.bound
        if steps.value > steps.bound:
            left.append((layer, problem, steps.value))
    if not left or len(left) * experts * ranks > MOST_COLUMNS or not program.installed():
        return Clusters(found, bound, False)
    for layer, problem, value in left:
        answer = solve(problem, limit_s=np.inf, nodes=NODES)
        bound[layer] = answer.bound
        if answer.value < value:
            found[layer] = answer.bin_of
    return Clusters(found, bound, True)


def ordered(between: NDArray[np.float64], ranks: int, node: int) -> NDArray[np.int64] | None:
    """Return the rank of each cluster, int64 [layers, ranks], at which the tokens `between` [layers - 1, ranks, ranks]
    go least far, every `node` ranks sharing one; None where there are too many ways to try."""
    apart = node == 1  # then every other rank is far, as within one node every other rank is near
    node = ranks if apart else min(node, ranks)
    stays, near = (FAR - HERE, 0.0) if apart else (NEAR - HERE, FAR - NEAR)
    rooms = [min(node, ranks - first) for first in range(0, ranks, node)]
    states, blocks = factorial(ranks), {room: comb(ranks, room) for room in rooms}
    for room in rooms:
        states //= factorial(room)
    solved = sum(many**2 for room, many in blocks.items() if room > ORDERS_TRIED) * len(between)
    if states > MOST_STATES or solved > MOST_ASSIGNMENTS:
        return None
    members = {room: np.array(list(combinations(range(ranks), room))) for room in blocks}
    number = {tuple(block): i for some in members.values() for i, block in enumerate(some.tolist())}
    divided = list(_divided(tuple(range(ranks)), rooms))
    block_of = np.array([[number[block] for block in blocks] for blocks in divided])
    best, came = np.zeros(len(divided)), []
    for table in between:
        kept = {room: near * _sums(table, some) + stays * _matched(table, some) for room, some in members.items()}
        through = best[:, None] + sum(
            kept[room][block_of[:, i][:, None], block_of[:, i]] for i, room in enumerate(rooms)
        )
        came.append(through.argmax(axis=0))
        best = through.max(axis=0)
    path = [int(best.argmax())]
    for before in reversed(came):
        path.append(int(before[path[-1]]))
    return _laid([divided[state] for state in reversed(path)], between, ranks)


def _divided(clusters: tuple[int, ...], rooms: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each node as many of the clusters as it has ranks, in their order."""
    if not rooms:
        yield ()
        return
    for block in combinations(clusters, rooms[0]):
        for others in _divided(tuple(c for c in clusters if c not in block), rooms[1:]):
            yield (block, *others)


def _sums(table: NDArray[np.float64], some: NDArray[np.int64]) -> NDArray[np.float64]:
    """Tokens between blocks of clusters, [blocks, blocks]."""
    inside = np.zeros((len(some), len(table)))
    np.put_along_axis(inside, some, 1.0, axis=1)
    return inside @ table @ inside.T


def _matched(table: NDArray[np.float64], some: NDArray[np.int64]) -> NDArray[np.float64]:
    """The most tokens between two blocks that can stay on their ranks, [blocks, blocks]."""
    if some.shape[1] <= ORDERS_TRIED:
        parts = table[some[:, None, :, None], some[None, :, None, :]]
        places = np.arange(some.shape[1])
        orders = permutations(range(some.shape[1]))
        return np.max([parts[..., places, list(order)].sum(axis=-1) for order in orders], axis=0)
    return np.array([[table[a, b[_partners(table, a, b)]].sum() for b in some] for a in some])


def _partners(table: NDArray[np.float64], a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each cluster of block `a` the place in `b` of the one that shares its rank."""
    return transported(-table[np.ix_(a, b)], 1)


def _laid(path: list[tuple[tuple[int, ...], ...]], between: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Ranks of clusters whose nodes are known: a cluster takes the rank of its partner in the layer before."""
    rank_of = np.zeros((len(path), ranks), np.int64)
    rank_of[0, [cluster for block in path[0] for cluster in block]] = np.arange(ranks)
    for layer, table in enumerate(between):
        for before, block in zip(path[layer], path[layer + 1], strict=True):
            a, b = np.array(before), np.array(block)
            rank_of[layer + 1, b[_partners(table, a, b)]] = rank_of[layer, a]
    return rank_of


def cost_of(between: NDArray[np.float64], rank_of: NDArray[np.int64], node: int) -> float:
    """Return how far the tokens `between` clusters on their ranks go, in all."""
    same = rank_of[:-1, :, None] == rank_of[1:, None]
    close = rank_of[:-1, :, None] // node == rank_of[1:, None] // node
    return float((between * np.where(same, HERE, np.where(close, NEAR, FAR))).sum())


def gap_of(between: NDArray[np.float64], rank_of: NDArray[np.int64], node: int) -> float:
    """Return by what share the tokens' way may be longer than the shortest of these clusters: two layers keep no more
    on ranks than the best assignment does, nor on nodes than each cluster's largest flows, as many as a node has
    ranks."""
    ranks = rank_of.shape[1]
    everyone, room = np.arange(ranks), min(node, ranks)
    most = 0.0
    for table in between:
        here = float(table[everyone, _partners(table, everyone, everyone)].sum())
        largest = (float(np.sort(table, axis=axis).take(range(ranks - room, ranks), axis).sum()) for axis in (0, 1))
        most += (NEAR - HERE) * here + (FAR - NEAR) * min(largest)
    bound = FAR * float(between.sum()) - most
    cost = cost_of(between, rank_of, node)
    return max(0.0, cost / bound - 1.0) if bound > 0 else 0.0
