"""Step graphs with data-parallel slices apart, and a duration for every pass of every microbatch of each.

Where microbatches differ, every data-parallel slice is a rank class of its own; all draws of a plan are timed by one
call of the engine. Of many different microbatches some are priced, and the others lie between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.packing import taken
from meshwright.cost import Costs
from meshwright.graph import TaskGraph
from meshwright.lower import Lowered, bind, structured
from meshwright.lower.place import Mesh
from meshwright.lower.roles import PassRole, Role
from meshwright.lower.stages import Stages
from meshwright.lower.structure import Structure
from meshwright.plan import Plan
from meshwright.simulate.engine import makespans
from meshwright.simulate.engine import times as in_order
from meshwright.simulate.price import Priced, Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.items import Batch

#: Tasks of the step graph in which data-parallel slices stand apart: more slices are folded into classes.
MOST_TASKS = 400_000


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where drawn microbatches lie among those that were priced, [draws, microbatches] each: between number ``low``
    and the next, ``share`` of the way. ``middle`` is the priced one nearest the mean."""

    batches: tuple[Batch, ...]
    middle: Batch
    low: NDArray[np.int64]
    share: NDArray[np.float64]
    distinct: int

    @property
    def weights(self) -> NDArray[np.float64]:
        """The share of drawn microbatches that each priced one stands for, summing to 1."""
        count = len(self.batches)
        total = np.bincount(self.low.ravel(), weights=1 - self.share.ravel(), minlength=count)
        total += np.bincount(np.minimum(self.low + 1, count - 1).ravel(), weights=self.share.ravel(), minlength=count)
        return total / self.low.size


def mixed(priced: list[Priced], weights: NDArray[np.float64]) -> Priced:
    """Prices of the mean of several microbatches."""
    fields: dict[str, Any] = {}
    for name in Priced.__struct_fields__:
        fields[name] = np.tensordot(weights, np.array([getattr(p, name) for p in priced]), 1)
    return Priced(**fields)


class Unfolded:
    """The step graph of a plan with its data-parallel slices apart, and a cost key for every pass and microbatch."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        typical: Simulated,
        folded: Structure,
        loads: NDArray,
        pricer: Pricer,
        varying: Callable[[Role], bool] = lambda role: isinstance(role, PassRole),
    ):
        """`varying` is whether a microbatch's documents change the work of a role."""
        stages = typical.lowered.stages
        self.members = members(plan, stages.mesh, typical.lowered.graph.num_tasks)
        mesh = Mesh(plan, cluster, apart=self.members)
        self.stages = Stages(plan, stages.model, stages.train, mesh, stages.known, stages.batch)
        self.structure = structured(self.stages, typical.schedule_params, {})
        bucket = pricer.costs.framework.defaults.bucket_bytes
        self.lowered = bind(self.structure, self.stages, bucket)
        self.others = pricer.all(self.lowered.programs)
        roles, graph = self.structure.roles, self.structure.graph
        self.program = np.zeros(len(roles), np.int64)
        self.program[graph.cost_key] = self.lowered.graph.cost_key
        inside = np.zeros(len(folded.roles), np.int64)
        inside[folded.graph.cost_key] = typical.lowered.graph.cost_key
        same = dict(zip(folded.roles, inside.tolist()))
        #: The program of the folded step that each role is, -1 for those that no microbatch changes; and its slice.
        self.folded = np.full(len(roles), -1, np.int64)
        self.slice = np.zeros(len(roles), np.int64)
        for i, role in enumerate(roles):
            if varying(role):
                alike = msgspec.structs.replace(role, slice=mesh.kinds_of_slices[role.slice])
                self.folded[i], self.slice[i] = same[alike], role.slice
        self.counts = self.structure.facts.counts
        self.role, self.microbatch, self.graph = self._keyed(graph)
        self.taken = self._dealt(loads)

    def _keyed(self, graph: TaskGraph) -> tuple[NDArray, NDArray, TaskGraph]:
        """Return the role and the microbatch of every cost key, and the graph with those keys."""
        passes = self.folded[graph.cost_key] >= 0
        width = max(self.counts) + 1
        code = graph.cost_key.astype(np.int64) * width
        drawn = graph.attribute("microbatch").astype(np.int64) % max(self.counts)  # of several passes of one the same
        code += np.where(passes, drawn, width - 1)
        keys, back = np.unique(code, return_inverse=True)
        role, microbatch = keys // width, keys % width
        names = [self.lowered.programs[p].name for p in self.program[role].tolist()]
        keyed = msgspec.structs.replace(
            self.lowered.graph,
            cost_key=back.astype(np.int32),
            keys=tuple(f"{name} #{i}" for i, name in enumerate(names)),
        )
        return role, microbatch, keyed

    def _dealt(self, loads: NDArray[np.float64]) -> NDArray[np.int64]:
        """The drawn microbatch that each class of slices takes in each place, [draws, classes, places]. A class of
        several slices takes those of its costliest; on equal devices the costliest slices are one class."""
        ranks = sum(len(m) for m in self.members)
        count = np.zeros(ranks, np.int64)
        for some, n in zip(self.members, self.counts):
            count[list(some)] = n
        first = np.cumsum(count) - count
        place = np.arange(int(count.sum()))
        if len(set(count.tolist())) == 1:
            place = np.concatenate([taken(len(place), i, ranks, self.stages.train.packing) for i in range(ranks)])
        out = np.zeros((len(loads), len(self.members), max(self.counts)), np.int64)
        for d, load in enumerate(loads[:, place]):
            total = np.add.reduceat(load, first)
            order = np.argsort(-total, kind="stable") if self.stages.mesh.alike else np.arange(ranks)
            for c, some in enumerate(self.members):
                mine = order[list(some)] if len(self.members) < ranks else np.array(some)
                costliest = mine[np.argmax(total[mine])]
                mine = place[first[costliest] : first[costliest] + count[costliest]]
                out[d, c, : len(mine)] = mine
        return out

    def timed(
        self, placed: Placed, priced: list[Priced], costs: Costs, shared: float
    ) -> tuple[NDArray[np.float64], Simulated]:
        """Return the seconds of every draw, and the simulation of the draw nearest their mean; `shared` is the factor
        by which shared ports and cores lengthen a step."""
        seconds = np.array([p.durations for p in priced])
        passes = np.flatnonzero(self.folded[self.role] >= 0)
        inside = self.folded[self.role[passes]]
        fixed = self.others.durations[self.program[self.role]]
        durations = np.tile(fixed, (len(self.taken), 1))
        for d in range(len(self.taken)):
            low, share = self._places(placed, d, passes)
            above = np.minimum(low + 1, len(priced) - 1)
            durations[d, passes] = seconds[low, inside] * (1 - share) + seconds[above, inside] * share
        steps = makespans(self.graph, durations) * shared
        nearest = int(np.argmin(np.abs(steps - steps.mean())))
        low, share = self._places(placed, nearest, passes)
        above = np.minimum(low + 1, len(priced) - 1)
        fields: dict[str, Any] = {}
        for name in Priced.__struct_fields__:
            rows = getattr(self.others, name)[self.program[self.role]]
            each = np.array([getattr(p, name) for p in priced])
            part = share[:, None] if each.ndim == 3 else share
            rows[passes] = each[low, inside] * (1 - part) + each[above, inside] * part
            fields[name] = rows
        start, end = in_order(self.graph, durations[nearest])
        lowered = Lowered(
            graph=self.graph,
            programs=tuple(self.lowered.programs[p] for p in self.program[self.role].tolist()),
            mesh=self.stages.mesh,
            stages=self.stages,
            actions=self.structure.actions,
            static_bytes=self.lowered.static_bytes,
        )
        shown = Simulated.of(lowered, Priced(**fields), (start * shared, end * shared), costs)
        return steps, shown

    def _places(self, placed: Placed, draw: int, passes: NDArray) -> tuple[NDArray, NDArray]:
        """Where the microbatch of every pass's key lies among the priced ones, in one draw."""
        taken = self.taken[draw, self.slice[self.role[passes]], self.microbatch[passes]]
        return placed.low[draw, taken], placed.share[draw, taken]


def members(plan: Plan, mesh: Mesh, tasks: int) -> tuple[tuple[int, ...], ...]:
    """Classes of data-parallel slices (indices along dp): one each, or as many as the graph may have, of one kind of
    devices each; `tasks` are those of the folded step."""
    dp, kinds = plan.trainers, len(mesh.slices)
    most = max(kinds, MOST_TASKS * kinds // max(1, tasks))
    found: list[tuple[int, ...]] = []
    at = {kind: [] for kind in range(kinds)}
    whole = Mesh(plan, mesh.cluster, apart=tuple((d,) for d in range(dp)))
    for d, kind in enumerate(whole.kinds_of_slices):
        at[kind].append(d)
    for some in at.values():
        classes = min(len(some), max(1, most * len(some) // dp))
        found += [tuple(part.tolist()) for part in np.array_split(np.array(some), classes)]
    return tuple(found)
