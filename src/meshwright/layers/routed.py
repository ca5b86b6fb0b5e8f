"""Where a mixture's tokens go under a plan: the busiest rank's load, what is dropped, and what every port carries.

Every rank's tokens are drawn alike, as routing statistics say (``routing=``), or evenly. An expert takes ``capacity``
times its even share of a rank's tokens of a microbatch at most (GShard, 2006.16668; Switch, 2101.03961), and what is
beyond is dropped. ``hot`` experts are on every rank, so that tokens on their way to them travel nowhere (Hecate,
2502.02581). All shares are of the copies of tokens, ``top_k`` of each, and are means over the layers, whose times add
up.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.placing import ExpertPlacement, placed
from meshwright.spec.routing import Routing, shares
from meshwright.work import Group, Hop

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.layers import Moe
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """``busiest``: copies that the busiest rank computes over the mean of all where nothing is dropped; ``kept``: the
    share that is not dropped, ``hot`` the share of experts that are everywhere. ``ports``: for every level of the
    expert-parallel group, innermost first, what the busiest port carries over what it would of an even exchange;
    ``inside`` and ``across``: the same of the two steps of an exchange in two levels."""

    busiest: float = 1.0
    kept: float = 1.0
    hot: float = 0.0
    ports: tuple[float, ...] = ()
    inside: tuple[float, ...] = ()
    across: tuple[float, ...] = ()

    def carried(self, group: Group) -> Group:
        """Return the group as an exchange of these tokens loads its ports."""
        return _loaded(group, self.ports)

    def carried_in_two(self, inner: Group, outer: Group) -> tuple[Group, Group]:
        """Return the groups of an exchange in two levels as these tokens load their ports."""
        return _loaded(inner, self.inside), _loaded(outer, self.across)


def _loaded(group: Group, ports: tuple[float, ...]) -> Group:
    if not ports:
        return group
    hops = tuple(msgspec.structs.replace(hop, carried=c) for hop, c in zip(group.hops, ports))
    return msgspec.structs.replace(group, hops=hops)


def node_of(group: Group) -> int:
    """Return how many ranks of a group share a node."""
    inside = 1
    for hop in group.hops:
        inside *= 1 if hop.scale_out else hop.members
    return inside


def load_of(
    model: Model, plan: Plan, train: Train, spec: Moe, tokens: int, group: Group, steps: tuple[Group, ...] = ()
) -> ExpertLoad:
    """Return the load of a mixture's ranks: `tokens` of a microbatch are routed by each rank of the expert-parallel
    `group`, whose exchange may be in two `steps`, inside runs of its ranks and across these."""
    experts = plan.experts
    if train.routing is None and not experts.capacity:
        return ExpertLoad(busiest=experts.imbalance)
    layers = len(model.routed_layers)
    routing = train.routing or Routing(said="even", skew=0.0)
    said = routing, layers, spec.experts, spec.top_k, tokens, experts.capacity
    return _load(*said, experts.hot, experts.placement, group, steps) if group.size > 1 else _alone(*said)


def served_load(routing: Routing | None, layers: int, experts: int, method: str, group: Group) -> ExpertLoad:
    """Return the load of ranks that serve: each has requests of its own, whose tokens all experts may be asked for."""
    if routing is None or group.size == 1:
        return ExpertLoad()
    return _load(routing, layers, experts, 1, 1, 0.0, 0, method, group)


def leaving(routing: Routing, layers: int, experts: int, method: str, group: Group) -> tuple[float, ...]:
    """Return what ports carry where tokens stay with their experts from layer to layer, at every level of the group
    over what they would if every token went anywhere."""
    node = node_of(group)
    lie = placement(routing, layers, experts, method, group.size, node)
    near, far = lie.leave_rank / (1.0 - 1.0 / group.size), lie.leave_node / max(1e-12, 1.0 - node / group.size)
    return tuple(far if hop.scale_out else near for hop in group.hops)


def placement(
    routing: Routing | None, layers: int, experts: int, method: str, ranks: int, node: int
) -> ExpertPlacement:
    """Return the placement of a model's experts; by even shares where nobody said how they are chosen."""
    return placed(routing or Routing(said="even", skew=0.0), layers, experts, method, ranks, node)


def hottest(routing: Routing, layers: int, experts: int, count: int) -> NDArray[np.int64]:
    """Return the experts of every layer that get most tokens, int64 [layers, count], in ascending order."""
    order = np.argsort(-shares(routing, layers, experts), axis=1, kind="stable")
    return np.sort(order[:, :count], axis=1)


def taken(share: NDArray[np.float64], top_k: int, tokens: int, capacity: float) -> NDArray[np.float64]:
    """Return the share of all copies that each expert takes in the mean, of those that want it: of n tokens each draws
    the expert with chance p = share * top_k (at most 1), and no more than the capacity are taken."""
    if not capacity:
        return share
    limit = most_rows(tokens, top_k, share.shape[-1], capacity)
    chance = np.minimum(1.0, share * top_k)
    mean, spread = tokens * chance, np.sqrt(tokens * chance * (1.0 - chance))
    # the mean of what a normal variable has below a limit: E[min(X, c)] = c - E[(c - X)+]
    z = (limit - mean) / np.where(spread > 0, spread, 1.0)
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    below = 0.5 * (1.0 + _erf(z / np.sqrt(2.0)))
    normal = limit - ((limit - mean) * below + spread * density)
    got = np.where(spread > 0, normal, np.minimum(mean, limit))
    return np.clip(got, 0.0, np.minimum(mean, limit)) / (tokens * top_k)


def most_rows(tokens: int, top_k: int, experts: int, capacity: float) -> int:
    """Return the copies of a rank's `tokens` that an expert takes at most."""
    return ceil(round(capacity * tokens * top_k / experts, 6))


def _erf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1.0 - poly * np.exp(-x * x))


@lru_cache(maxsize=4096)
def _alone(routing: Routing, layers: int, experts: int, top_k: int, tokens: int, capacity: float) -> ExpertLoad:
    kept = float(taken(shares(routing, layers, experts), top_k, tokens, capacity).sum(axis=1).mean())
    return ExpertLoad(busiest=kept, kept=kept)


@lru_cache(maxsize=4096)
def _load(
    routing: Routing,
    layers: int,
    experts: int,
    top_k: int,
    tokens: int,
    capacity: float,
    hot: int,
    method: str,
    group: Group,
    steps: tuple[Group, ...] = (),
) -> ExpertLoad:
    got = taken(shares(routing, layers, experts), top_k, tokens, capacity)
    ranks, node = group.size, node_of(group)
    rank_of = placement(routing, layers, experts, method, ranks, node).rank_of
    kept, here = got.sum(axis=1), np.zeros(layers)
    if hot:
        everywhere = hottest(routing, layers, experts, hot)
        here = np.take_along_axis(got, everywhere, axis=1).sum(axis=1)
        got = got.copy()
        np.put_along_axis(got, everywhere, 0.0, axis=1)
    of_rank = np.zeros((layers, ranks))
    np.add.at(of_rank, (np.arange(layers)[:, None], rank_of), got)
    # so much stays on its node, wherever chance would send it
    stays = (1.0 - routing.near) / (1.0 - node / ranks) if routing.near and node < ranks else 1.0

    def ports(hops: tuple[Hop, ...], loads: NDArray[np.float64], under: int = 1) -> tuple[float, ...]:
        return tuple(_port(loads, hop.below * under) * (stays if hop.scale_out else 1.0) for hop in hops)

    inside, across = (), ()
    if steps:  # a rank passes on what is for those at its own place of every run
        inner = steps[0].size
        inside = ports(steps[0].hops, of_rank.reshape(layers, -1, inner).sum(axis=1))
        across = ports(steps[1].hops, of_rank, inner)
    return ExpertLoad(
        busiest=float((ranks * of_rank.max(axis=1) + here).mean()),
        kept=float(kept.mean()),
        hot=hot / experts,
        ports=ports(group.hops, of_rank),
        inside=inside,
        across=across,
    )


def _port(of_rank: NDArray[np.float64], below: int) -> float:
    """Return the load of the busiest port of children of `below` ranks each, over that of an even exchange: others send
    to its experts, or its own ranks to others'."""
    layers, ranks = of_rank.shape
    child = of_rank.reshape(layers, ranks // below, below).sum(axis=2)
    received = child * (ranks - below)
    sent = (child.sum(axis=1, keepdims=True) - child) * below
    even = below * (ranks - below) / ranks
    return float((np.maximum(received, sent).max(axis=1) / even).mean())
