"""Experts onto ranks: as many on each, so that loads are even and tokens travel little between layers.

``balanced`` evens out the loads of each layer by itself. ``moetuner`` (Go and Mahajan, 2025, arXiv 2502.06643) is two
problems one after the other: experts into clusters of even load, then clusters onto ranks so that tokens which leave a
cluster of one layer find the next one near (:mod:`.clusters`). ``exflow`` (Yao et al., 2024, arXiv 2401.08383) places
experts themselves where the tokens of the layers beside them are, whatever the loads. Where the exact ways are too
large, steps take their place: one layer between two that stay is a transportation problem, solved exactly; layers are
gone through forwards and backwards until no layer gets better by itself. Every answer comes with bounds that no
placement gets below.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Problem, solve
from meshwright.assign.clusters import FAR, HERE, NEAR, clustered, gap_of, ordered
from meshwright.assign.transport import transported
from meshwright.errors import MeshwrightError
from meshwright.native import Float64s, OutFloat64s, OutInt64s, native
from meshwright.spec.routing import GIVEN, PLACEMENTS, Routing, follows, given_ranks, shares

#: Times that all layers are gone through at most; two or three are usual.
SWEEPS = 6
#: Beginnings that are tried: so many that their tables have about as many cells, within bounds.
FEWEST_STARTS, MOST_STARTS, START_CELLS = 3, 64, 10_000_000

#: How a problem of ``moetuner`` was solved.
PROGRAM, EXACTLY, STEPS = "integer programs", "dynamic programming", "steps"


class ExpertPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """``rank_of`` int64 [layers, experts]. ``busiest`` is the load of a layer's busiest rank over the mean, averaged
    over layers, and ``busiest_bound`` what no placement gets below. Of the tokens between two layers ``leave_rank`` go
    to another rank and ``leave_node`` to another node, shares; no placement has less than the ``_bound`` of each. Of
    ``moetuner`` ``clusters_by`` and ``order_by`` say how each of its problems was solved, and ``order_gap`` by what
    share the tokens' way between these clusters may be longer than the shortest."""

    rank_of: NDArray[np.int64]
    busiest: float
    busiest_bound: float
    leave_rank: float
    leave_rank_bound: float
    leave_node: float
    leave_node_bound: float
    clusters_by: str = ""
    order_by: str = ""
    order_gap: float = 0.0

    @property
    def solved(self) -> str:
        """How the two problems of ``moetuner`` were solved and how far from the best they may be, "" of others."""
        if not self.clusters_by:
            return ""
        over = self.busiest / self.busiest_bound - 1.0
        first = f"clusters by {self.clusters_by} (busiest at most {over:.2%} over the least)"
        return f"{first}, their ranks by {self.order_by} (at most {self.order_gap:.0%} over the shortest way)"

    @property
    def order(self) -> NDArray[np.int64]:
        """The experts of every layer as they lie on ranks one after the other, int64 [layers, experts]."""
        return np.argsort(self.rank_of, axis=1, kind="stable")


@lru_cache(maxsize=64)
def placed(routing: Routing, layers: int, experts: int, method: str, ranks: int, node: int) -> ExpertPlacement:
    """Place the experts of a model's mixtures on `ranks`, the first `node` of which share a node, and so on.

    Raises:
        MeshwrightError: R004 for a method that is none.
    """
    loads, after = shares(routing, layers, experts), follows(routing, layers, experts)
    if method == GIVEN:
        return told(loads, after, given_ranks(routing), ranks=ranks, node=node)
    return place(loads, after, method=method, ranks=ranks, node=node)


def place(
    loads: NDArray[np.float64], after: NDArray[np.float64], *, method: str, ranks: int, node: int
) -> ExpertPlacement:
    """Place experts by their `loads` [layers, experts] and by what follows what, `after` [layers - 1, experts,
    experts], on `ranks` of which every `node` share one.

    Raises:
        MeshwrightError: R004 for a method that is none.
        ValueError: experts that do not divide by the ranks.
    """
    if method not in PLACEMENTS:
        raise MeshwrightError.one("R004", f"no placement {method!r} of experts", help=", ".join(PLACEMENTS))
    layers, experts = loads.shape
    if experts % ranks:
        raise ValueError(f"{experts} experts do not divide by {ranks} ranks")
    rank_of = np.tile(np.arange(experts) // (experts // ranks), (layers, 1))
    if method in ("balanced", "moetuner"):
        rank_of = np.stack([_balanced(one, ranks) for one in loads])
    if method == "moetuner":
        return _in_two(loads, after, rank_of, ranks, node)
    elif method == "exflow":
        rank_of = _together(after, ranks, node)
    return told(loads, after, rank_of, ranks=ranks, node=node)


def _in_two(
    loads: NDArray[np.float64], after: NDArray[np.float64], of: NDArray[np.int64], ranks: int, node: int
) -> ExpertPlacement:
    """MoETuner's two programs, or the steps in place of those that are too large: clusters, then their order."""
    found = clustered(loads, of, ranks)
    of = found.of
    between = np.array([_summed(t, of[i], of[i + 1], ranks) for i, t in enumerate(after)]).reshape(-1, ranks, ranks)
    order = ordered(between, ranks, node)
    order_by = EXACTLY if order is not None else STEPS
    order = _together(between, ranks, node) if order is None else order
    placement = told(loads, after, np.take_along_axis(order, of, axis=1), ranks=ranks, node=node)
    bound = float((found.bound / (loads.sum(axis=1) / ranks)).mean())
    return msgspec.structs.replace(
        placement,
        busiest_bound=min(placement.busiest, max(placement.busiest_bound, bound)),
        clusters_by=PROGRAM if found.solved else STEPS,
        order_by=order_by,
        order_gap=0.0 if order_by == EXACTLY else gap_of(between, order, node),
    )


def told(
    loads: NDArray[np.float64], after: NDArray[np.float64], rank_of: NDArray[np.int64], *, ranks: int, node: int
) -> ExpertPlacement:
    """Return a placement with its loads, what leaves ranks and nodes, and the bounds of both."""
    layers, experts = loads.shape
    on_rank = np.zeros((layers, ranks))
    np.add.at(on_rank, (np.arange(layers)[:, None], rank_of), loads)
    means = loads.sum(axis=1) / ranks
    between = max(1, layers - 1)
    stay = sum(t[rank_of[i][:, None] == rank_of[i + 1][None, :]].sum() for i, t in enumerate(after))
    close = sum(t[rank_of[i][:, None] // node == rank_of[i + 1][None, :] // node].sum() for i, t in enumerate(after))
    total = sum(float(t.sum()) for t in after) or 1.0
    slots = experts // ranks
    return ExpertPlacement(
        rank_of=rank_of,
        busiest=float((on_rank.max(axis=1) / means).mean()),
        busiest_bound=float(np.maximum(loads.max(axis=1) / means, 1.0).mean()),
        leave_rank=float(1 - stay / total) if layers > 1 else 0.0,
        leave_rank_bound=_leaving_bound(after, slots, total) if layers > 1 else 0.0,
        leave_node=float(1 - close / total) if between and layers > 1 else 0.0,
        leave_node_bound=_leaving_bound(after, min(experts, slots * node), total) if layers > 1 else 0.0,
    )


def _leaving_bound(after: NDArray[np.float64], room: int, total: float) -> float:
    """The least share that leaves groups of `room` experts: those of an expert that stay reach `room` experts of the
    next layer at most, and those that an expert gets come from as many."""
    if room >= after.shape[-1]:
        return 0.0
    staying = 0.0
    for table in after:
        most = (
            np.sort(table, axis=axis).take(range(table.shape[axis] - room, table.shape[axis]), axis) for axis in (0, 1)
        )
        staying += min(float(one.sum()) for one in most)
    return max(0.0, 1.0 - staying / total)


def _summed(
    table: NDArray[np.float64], rows: NDArray[np.int64], columns: NDArray[np.int64], ranks: int
) -> NDArray[np.float64]:
    """Tokens between clusters, [ranks, ranks], of a table between experts."""
    found = np.zeros((ranks, ranks))
    np.add.at(found, (rows[:, None], columns[None, :]), table)
    return found


def _balanced(loads: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """As many experts on each rank, the most loaded first onto the least loaded; then changes of place between two
    ranks while the busiest gets less."""
    slots = len(loads) // ranks
    problem = Problem(sizes=np.ones(len(loads), np.int64), capacity=slots, costs=loads, num_bins=ranks)
    bin_of = solve("heaviest-first", problem).bin_of.astype(np.int64)
    summed = np.bincount(bin_of, weights=loads, minlength=ranks)
    _even_out(np.ascontiguousarray(loads), len(loads), ranks, bin_of, summed)
    return bin_of


def _together(after: NDArray[np.float64], ranks: int, node: int) -> NDArray[np.int64]:
    """Ranks of items [layers, items], as many on each, so that what goes from layer to layer costs little: the best of
    some beginnings, each of which lays the first layer out in another order."""
    items = after.shape[1] if len(after) else ranks
    layers, slots = len(after) + 1, items // ranks
    usual, rng = np.arange(items) // slots, np.random.default_rng(0)
    starts = max(FEWEST_STARTS, min(MOST_STARTS, START_CELLS // max(1, after.size)))
    best, most = np.tile(usual, (layers, 1)), -np.inf
    for start in range(starts if layers > 1 else 0):
        rank_of = np.tile(usual if start == 0 else rng.permutation(usual), (layers, 1))
        saved = _settled(rank_of, after, ranks, node)
        if saved > most:
            best, most = rank_of, saved
    return best


def _settled(rank_of: NDArray[np.int64], after: NDArray[np.float64], ranks: int, node: int) -> float:
    """Go through the layers of `rank_of` until none gets better by itself; return what is saved of the cost if all
    tokens went to another node."""
    layers, items = rank_of.shape
    most, saved, prices = -np.inf, 0.0, np.zeros((layers, ranks))
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        saved = 0.0
        for layer in range(layers) if forwards else range(layers - 1, -1, -1):
            gain = np.zeros((items, ranks))
            if layer:
                gain += _saved(after[layer - 1].T, rank_of[layer - 1], ranks, node)
            behind = gain if forwards else None
            if layer + 1 < layers and sweep:  # in the first walk layers behind are not yet anywhere
                ahead = _saved(after[layer], rank_of[layer + 1], ranks, node)
                behind = gain if forwards else ahead
                gain = gain + ahead
            if layer or sweep:
                rank_of[layer] = transported(-gain, items // ranks, prices[layer])
            if behind is not None:  # what is saved between this layer and the one that was placed before it
                saved += float(np.take_along_axis(behind, rank_of[layer][:, None], axis=1).sum())
        if saved <= most * (1 + 1e-6):
            break
        most = saved
    return max(most, saved)


def _saved(table: NDArray[np.float64], rank_of: NDArray[np.int64], ranks: int, node: int) -> NDArray[np.float64]:
    """Return the saving of each item on each rank, float64 [items, ranks], by tokens `table` [items, others] between it
    and others that are on `rank_of`, as many on each rank."""
    items = len(table)
    on_rank = table[:, np.argsort(rank_of, kind="stable")].reshape(items, ranks, -1).sum(axis=2)
    whole = ranks // node * node
    on_node = np.zeros_like(on_rank)
    on_node[:, :whole] = np.repeat(on_rank[:, :whole].reshape(items, -1, node).sum(axis=2), node, axis=1)
    on_node[:, whole:] = on_rank[:, whole:].sum(axis=1, keepdims=True)
    return (FAR - NEAR) * on_node + (NEAR - HERE) * on_rank


@native("num_items", "bins", "num_items")
def _even_out(loads: Float64s, num_items: int, bins: int, bin_of: OutInt64s, summed: OutFloat64s) -> None:
    """Swap an item of the costliest bin with one elsewhere while the costlier of the two gets less, the best first."""
    for _ in range(4 * num_items):
        worst = 0
        for one in range(bins):
            if summed[one] > summed[worst]:
                worst = one
        best, give, take = summed[worst] * (1.0 - 1e-9), -1, -1
        for a in range(num_items):
            if bin_of[a] != worst:
                continue
            for b in range(num_items):
                other = bin_of[b]
                if other == worst or loads[b] >= loads[a]:
                    continue
                moved = loads[a] - loads[b]
                after = max(summed[worst] - moved, summed[other] + moved)
                if after < best:
                    best, give, take = after, a, b
        if give < 0:
            break
        other = bin_of[take]
        moved = loads[give] - loads[take]
        summed[worst] -= moved
        summed[other] += moved
        bin_of[give] = other
        bin_of[take] = worst
