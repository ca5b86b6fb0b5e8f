"""The part of every sum that each replica makes, by the linear program of the widths of their links (DeDLOC, Diskin et
al. 2106.10207).

Replica i sends each other one the values that this one sums, and the sum that i itself makes. So the bytes through any
port are linear in the parts, and the parts are sought for which the busiest port carries its bytes soonest; of equally
good ones those whose largest part is least. Between n equal peers with a port each a port carries 1 + (n - 2) part_i of
the values, as in the authors' library (hivemind, ``averaging/load_balancing.py``), so that all have a part alike; where
one port is as wide as all others together, its peer sums everything.
"""

from __future__ import annotations

from time import perf_counter

import msgspec
import numpy as np

from meshwright.assign.program import LinearRow, minimise
from meshwright.lower.meeting import Message, crossed, ends
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.quantity import seconds as shown
from meshwright.spec.cluster import Cluster
from meshwright.sync.divided import rounded, written
from meshwright.sync.policy import read

#: Parts that are as good as the best up to this share.
EQUAL = 1e-7


class SumChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of every sum that each replica makes, and how many seconds the busiest port takes for a gigabyte
    of gradients: so divided (``gb_s``), by the program's optimum before rounding (``bound_s``), in equal parts
    (``even_s``) and with one replica that sums all, the best of them (``server_s``)."""

    sums: tuple[int, ...]
    gb_s: float
    bound_s: float
    even_s: float
    server_s: float
    seconds: float

    @property
    def trainers(self) -> int:
        """Replicas that sum nothing."""
        return self.sums.count(0)

    @property
    def text(self) -> str:
        """The choice in words."""
        return (
            f"{len(self.sums) - self.trainers} of {len(self.sums)} replicas sum gradients, in parts chosen in "
            f"{shown(self.seconds)}: the busiest port takes {shown(self.gb_s)} for a gigabyte, where the linear "
            f"program's optimum is {shown(self.bound_s)}, equal parts {shown(self.even_s)} and one server for all "
            f"{shown(self.server_s)}"
        )


def divided(plan: Plan, cluster: Cluster) -> tuple[Plan, SumChoice]:
    """The plan with the parts that replicas sum, and how they were chosen.

    Raises:
        MeshwrightError: L003 where the solver is not installed.
    """
    began, n = perf_counter(), plan.layout.dp * plan.layout.cp
    ports = port_bytes(Mesh(plan, cluster), n, read(plan.sync.policy).helpers)
    best, least = shares(ports)
    sums = rounded(best)
    one = [float(ports[:, i].max()) for i in range(n)]
    choice = SumChoice(
        sums=sums,
        gb_s=float((ports @ np.array(sums)).max() / sum(sums)),
        bound_s=least,
        even_s=float(ports.mean(1).max()),
        server_s=min(one),
        seconds=perf_counter() - began,
    )
    said = read(plan.sync.policy)
    words = msgspec.structs.replace(said, values=said.values | {"sums": written(sums)}).text
    return msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, policy=words)), choice


def port_bytes(mesh: Mesh, n: int, helpers: int = 0) -> np.ndarray:
    """Seconds that every port takes, either way, for a gigabyte of gradients that replica j sums alone [ports, n]: a
    division of the sum takes their mean, weighted with its parts. The last ``helpers`` bring nothing to sum."""
    group = mesh.among("data", 0)
    every: list[Message] = [(i, j, 1.0) for i in range(n) for j in range(n) if i != j]
    brings = np.arange(n) < n - helpers
    source, target = ends(mesh, group, every)
    from_, to = (np.tile([one[end] for one in every], len(source) // len(every)) for end in (0, 1))
    rows = []
    for level, crossing, unit, slower, lone in crossed(mesh, group, 0, source, target):
        for of, slow in ((unit, slower), (np.arange(mesh.num_ranks), lone)):
            for end in (source, target):
                found = np.zeros((int(of.max()) + 1, n))
                at = of[end[crossing]]
                cost = slow[end[crossing]] / level.busy_gb_s
                # a message carries the part that one end sums, and the other's sum
                np.add.at(found, (at, from_[crossing]), cost)
                np.add.at(found, (at, to[crossing]), cost * brings[from_[crossing]])
                rows.append(found[found.any(1)])
    return np.unique(np.concatenate(rows).round(12), axis=0)


def shares(ports: np.ndarray) -> tuple[np.ndarray, float]:
    """The parts [n] that sum to 1 with the least ``max(ports @ parts)``, of these the ones whose largest is least; and
    that optimum."""
    n = ports.shape[1]
    whole = LinearRow(range(n), [1.0] * n, 1.0, 1.0)
    limit = [LinearRow(range(n + 1), [*row, -1.0], high=0.0) for row in (ports / ports.max()).tolist()]
    most = [LinearRow((i, n), (1.0, -1.0), high=0.0) for i in range(n)]
    least = _solved(n, [whole, *limit], np.inf)[n]
    fixed = [LinearRow(range(n), row, high=least * (1 + EQUAL)) for row in (ports / ports.max()).tolist()]
    found = _solved(n, [whole, *fixed, *most], 1.0)[:n].clip(0.0)
    return found / found.sum(), float(least * ports.max())


def _solved(n: int, rows: list[LinearRow], most: float) -> np.ndarray:
    """Least last of n parts and one bound on them."""
    cost, high = np.eye(n + 1)[n], np.append(np.ones(n), most)
    found = minimise(cost, np.zeros(n + 1), high, np.zeros(n + 1, bool), rows)
    assert found.x is not None  # one replica that sums all is a solution
    return found.x
