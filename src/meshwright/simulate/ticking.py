"""Replicas that step and meet by clocks of their own (``sync/clocks.py``), on a virtual clock.

A replica goes through its ticks in their order: a gradient step takes a step's time, and a meeting begins when both are
there and takes what two messages between them take. Nobody waits for all, but that a run asks in every step whether it
is to end, and hears the answer of the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.lower.meeting import meeting
from meshwright.sync.clocks import Clocks, edges
from meshwright.sync.fragments import NEIGHBOURS
from meshwright.sync.groups import graph
from meshwright.sync.policy import read
from meshwright.work import Collective

if TYPE_CHECKING:
    from meshwright.cost import Costs
    from meshwright.lower import Lowered

#: Ticks that are simulated, and units of time, at least and at most; the part of them in which replicas drift apart.
MOST_TICKS, LEAST_UNITS, MOST_UNITS, SETTLES = 60_000, 4, 400, 0.25
#: What a meeting of two replicas takes, in seconds.
MeetingSeconds = Callable[[int, int], float]


def ended(clocks: Clocks, steps_s: NDArray[np.float64], meets: MeetingSeconds) -> NDArray[np.float64]:
    """Return when every replica has ended every unit of time, in seconds [units, replicas], of gradient steps that take
    `steps_s` [units, replicas]."""
    units, n = steps_s.shape
    now, out = np.zeros(n), np.zeros((units, n))
    for unit in range(units):
        begun = now.max()
        for tick in clocks.ticks(n, unit):
            i, j = tick.replica, tick.other
            if j < 0:
                now[i] += steps_s[unit, i]
            else:
                now[i] = now[j] = max(now[i], now[j]) + meets(i, j)
        now = np.maximum(now, begun)
        out[unit] = now
    return out


def num_units(clocks: Clocks, replicas: int) -> int:
    """Return how many units of time are simulated of so many replicas."""
    return int(np.clip(MOST_TICKS / (replicas + clocks.rate(replicas)), LEAST_UNITS, MOST_UNITS))


def meetings_of(lowered: Lowered, costs: Costs, whole_s: float) -> MeetingSeconds:
    """Return what each meeting takes, where that of the pair which the graph has takes so long: others differ by the
    links between them."""
    policy = read(lowered.plan.sync.policy)
    moves = _moves(lowered)
    if not moves:
        return lambda i, j: whole_s
    mesh, replicas = lowered.mesh, moves[0].group.size
    name = "replica" if lowered.plan.layout.shard else "dp"
    group, device = mesh.among(name, 0), mesh.cluster.islands[0].device
    shown = sum(costs.price(Collective(op=m.op, num_bytes=m.num_bytes, group=m.group), device).seconds for m in moves)
    known: dict[tuple, float] = {}
    found: dict[tuple[int, int], float] = {}
    for i, j in edges(graph(policy.group, replicas)):
        met = meeting(mesh, group, 0, [(i, j, 1.0), (j, i, 1.0)])
        if met.hops not in known:
            sends = (Collective(op=NEIGHBOURS, num_bytes=m.num_bytes, group=met) for m in moves)
            known[met.hops] = sum(costs.price(one, device).seconds for one in sends)
        found[i, j] = max(0.0, whole_s + known[met.hops] - shown)
    return lambda i, j: found[i, j]


def _moves(lowered: Lowered) -> list:
    """The messages of one rank in a meeting, of the rank that has most."""
    graph, by_rank = lowered.graph, {}
    for task in range(graph.num_tasks):
        program = lowered.programs[graph.cost_key[task]]
        if program.clocked:
            rank = int(graph.streams.rank[graph.member[graph.member_ptr[task]]])
            by_rank.setdefault(rank, []).extend(program.moves)
    return max(by_rank.values(), key=lambda some: sum(m.num_bytes for m in some), default=[])


def meetings_a_step(lowered: Lowered, costs: Costs, inner_s: float, meets_s: float) -> float:
    """Return how many times what one meeting takes a step of `inner_s` is longer for its meetings, in the mean: those
    of a replica, and that it waits for the other."""
    policy = read(lowered.plan.sync.policy)
    layout = lowered.plan.layout
    replicas = layout.dp * layout.cp // policy.rule.together(lowered.plan)
    if meets_s <= 0:
        return 0.0
    steps_s = np.full((num_units(policy.clocks, replicas), replicas), inner_s)
    ends_s = ended(policy.clocks, steps_s, meetings_of(lowered, costs, meets_s))
    return (rate_of(ends_s) - inner_s) / meets_s


def rate_of(ends_s: NDArray[np.float64]) -> float:
    """Return the seconds of a unit of time, once replicas are as far apart as they get."""
    first = int(SETTLES * len(ends_s))
    return float((ends_s[-1].mean() - ends_s[first].mean()) / (len(ends_s) - 1 - first))
