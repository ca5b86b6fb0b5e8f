"""Costs beside the schedule, the same for every schedule: exchanges of parameters and gradients, and ranks' state."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from meshwright.lower.bind import Binder
from meshwright.lower.place import Mesh, first_of_group
from meshwright.lower.program import Program
from meshwright.lower.roles import NormRole
from meshwright.lower.stages import Stages
from meshwright.lower.state import STORED_BYTES, gathered_bytes, static_bytes, unscattered_bytes
from meshwright.lower.tier_sizes import least_kept
from meshwright.lower.units import Unit
from meshwright.plan.facet import BALANCED, EXCHANGE
from meshwright.plan.facets import fields
from meshwright.search.columns import Exchanged, units_of
from meshwright.search.evaluate import Evaluator
from meshwright.search.parts import Inners
from meshwright.search.paths import Paths
from meshwright.search.space import PLAIN, SHARDED, Core, Inner, Piped, State, plan_of
from meshwright.spec.architecture import HEAD
from meshwright.sync.policy import read
from meshwright.work import Group

#: What the bytes of a rank's state, and what is exchanged of it, depend on in an inner part, besides what overlaps.
STORED = tuple(n for n in Inner._fields if EXCHANGE in fields()[n].decides and n != "overlap")


_stored = attrgetter(*STORED)
#: Collectives one after the other: (op, bytes, group) each.
Steps = tuple[tuple[str, float, Group], ...]
#: How many times a block's bytes are a message without end: more than any model has blocks, of whatever sizes.
MANY = 1e6


class Exchanges:
    """Exchanges and constant state of the regions of one question."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.layers = evaluator, evaluator.layers
        self.model, self.cluster, self.train = evaluator.trained, evaluator.cluster, evaluator.train
        self.kinds, self.num_units = evaluator.kinds, evaluator.num_units
        self.units = units_of(self.kinds, "none")
        self.alike, self.devices = evaluator.alike, evaluator.devices
        self._prices: dict[tuple, float] = {}
        self._exchanges: dict[tuple, tuple] = {}
        self._constant: dict[tuple, np.ndarray] = {}

    def binder(self, stages: Stages, mesh: Mesh | None = None) -> Binder:
        """The binder of a plan's roles, on another mesh than its own if one is given."""
        return Binder(stages, mesh or stages.mesh, self.evaluator.costs.framework.defaults.bucket_bytes)

    def price(self, program: Program) -> float:
        """Seconds of one program, as the simulator prices it."""
        pricer = self.layers.pricer
        return pricer.moved(program).seconds if program.kind == "exchange" else pricer(program).seconds

    def paired(self, core: Core, inners: Inners, piped: Piped, blocks: int, paths: Paths) -> np.ndarray:
        """Seconds [A] in which two ranks that hold copies of a stage add up its gradients, which they do in the open:
        as many exchanges as a rank holds stages, of `blocks` blocks each, between the two ranks that are nearest; 0
        where a stage is on one rank of the schedule's `paths`."""
        pairs = tuple(dict.fromkeys(paths.stage_ranks))
        if len(pairs[0]) == 1:
            return np.zeros(len(inners))
        known: dict[tuple, float] = {}
        for inner in inners:
            same = (inner.order, inner.grads, inner.dtype)
            if same not in known:
                key = (core._replace(mb=1), *same, pairs, blocks)
                if key not in self._prices:
                    self._prices[key] = self._added_up(core, inner, pairs, blocks)
                known[same] = 2 * piped.vpp * self._prices[key]
        return np.array([known[i.order, i.grads, i.dtype] for i in inners])

    def _added_up(self, core: Core, inner: Inner, pairs: tuple[tuple[int, ...], ...], blocks: int) -> float:
        """Return the seconds of adding up the gradients of `blocks` blocks between two pipeline ranks, the fastest of
        `pairs` in any slice: in one message, as where ZeRO shards the optimizer, which takes no longer than the buckets
        of a framework without."""
        plan = plan_of(core, inner, PLAIN, SHARDED)
        mesh = self.layers.mesh(plan)
        stages = self.layers.stages(plan, mesh)
        params = (stages.params(u) for u in self.units[: self.kinds])
        size = blocks * min(p.trained_dense + p.trained_expert for p in params) * STORED_BYTES[inner.grads]
        slices = mesh.slices[:1] if self.alike else mesh.slices
        groups = {mesh.pair(s.starts[a], s.starts[b]) for s in slices for a, b in pairs}
        binder = self.binder(stages, mesh)
        return min(self.price(binder.moving((("all_reduce", size, group),))) for group in groups)

    def crowded(self, core: Core, states: Sequence[State], inners: Inners) -> bool:
        """The blocks' constant state alone, spread evenly over the ranks, is more than a device holds."""
        room = max(device.memory_bytes for device in self.devices)
        return self.least_state_bytes(core, states, inners) / core.pp > room

    def least_state_bytes(self, core: Core, states: Sequence[State], inners: Inners) -> float:
        """Constant bytes of all blocks over one pipeline, under the precisions and the state part that need least."""
        layers = np.array(self.model.layers_by_kind, float)
        alike = [inners[places[0]] for places in inners.grouped(*STORED)]
        return min(float(self.state_bytes(core, one, s)[: self.kinds] @ layers) for one in alike for s in states)

    def exchanged(self, core: Core, inners: Inners, states: Sequence[State]) -> Exchanged:
        """Return the seconds of data parallelism's exchanges, for every inner part and every state part."""
        shape = (len(inners), len(states), self.kinds)
        gather, reduce = np.zeros(shape), np.zeros(shape)
        first, last = np.zeros(shape[:2]), np.zeros(shape[:2])
        alike: dict[tuple, list[int]] = {}
        synchronous = any(device.synchronous for device in self.devices)
        for a, inner in enumerate(inners):
            cut = "dp" in inner.overlap and not synchronous
            alike.setdefault((inner.order, *_stored(inner), cut), []).append(a)
        core = core._replace(mb=1)  # which says nothing about parameters
        for same, chosen in alike.items():
            for c, state in enumerate(states):
                found = self._exchanges.get((core, same, state))
                if found is None:
                    found = self._exchange(core, inners[chosen[0]], state, cut=same[-1])
                    self._exchanges[core, same, state] = found
                gather[chosen, c], reduce[chosen, c], first[chosen, c], last[chosen, c] = found
        return Exchanged(gather=gather, reduce=reduce, first=first, last=last)

    def _exchange(self, core: Core, inner: Inner, state: State, *, cut: bool) -> tuple:
        """Seconds of gathering and of reducing a block of each kind, of the first gather or, where parameters are
        gathered after the update, of all, and of what ends a step.
        Where passes are not `cut` at their exchanges, a stage's go in one message: a block then takes its share of one
        so large that no stage's takes less for its bytes."""
        plan = plan_of(core, inner, PLAIN, state)
        mesh = self.layers.mesh(plan)
        stages = self.layers.stages(plan, mesh)
        units, binder = self.units, self.binder(stages, mesh)

        def seconds(what: str, *chosen: Unit, times: float = 1.0) -> float:
            if core.dp * core.cp == 1 or (what == "gather" and not state.zero):
                return 0.0
            starts = mesh.slices[0].starts[:1] if self.alike else mesh.slices[0].starts
            exchanges = {binder.steps(chosen, what, first_of_group(mesh, s)) for s in starts}
            return min(self.price(binder.moving(_larger(steps, times))) for steps in exchanges)

        def shares(what: str) -> list[float]:
            if cut:
                return [seconds(what, b) for b in blocks]
            return [seconds(what, b, times=MANY) / MANY for b in blocks]

        blocks = units[: self.kinds]
        first = min(seconds("gather", units[-2], b) for b in blocks)
        # replicas that step together have one norm, those that step apart each their own
        apart = range(len(mesh.slices)) if read(state.sync).rule.together(plan) < core.dp * core.cp else (0,)
        norm = min(self.price(binder(NormRole(index))) for index in apart)
        trained = sum(n * binder.updated_params((u,)) for u, n in zip(blocks, self.model.layers_by_kind))
        sites = {binder.site(index, r) for index, s in enumerate(mesh.slices) for r in range(len(s.devices))}
        update = min(self.price(binder.updating(trained / core.pp, site)) for site in sites)
        if plan.offload.optimizer:  # the device has a part of it, or none
            update = 0.0
        gathers = shares("gather")
        if plan.gathers_after:  # all at once, on the rank that holds most, and beside no pass
            each = (seconds("gather", b, times=MANY) / MANY for b in blocks)
            first = sum(s * n for s, n in zip(each, self.model.layers_by_kind)) / core.pp
            gathers = [0.0] * len(blocks)
        return gathers, shares("reduce"), first, norm + update

    def state_bytes(self, core: Core, inner: Inner, state: State) -> np.ndarray:
        """Constant bytes of each unit [U] on a rank that holds it; a tied head as where it shares the embedding's
        table, which some schedules place beside it."""
        key = (core._replace(mb=1), *_stored(inner), state)
        found = self._constant.get(key)
        if found is None:
            found = self._constant[key] = self._state_bytes(core, inner, state)
        return found

    def _state_bytes(self, core: Core, inner: Inner, state: State) -> np.ndarray:
        plan = plan_of(core, inner, PLAIN, state)
        stages = self.layers.stages(plan, self.layers.mesh(plan))
        alone = plan_of(core._replace(pp=1), inner, PLAIN, state)
        beside = self.layers.stages(alone, self.layers.mesh(alone))
        out = np.zeros(self.num_units)
        # shards that are assigned by memory may be next to nothing somewhere
        part = 0.0 if state.hold == BALANCED else min(stages.mesh.held) if plan.kinds.hold else None
        for i, unit in enumerate(self.units):
            held = beside if unit.kind == HEAD else stages
            params = held.params(unit)
            kept = least_kept(held, unit) if plan.offload.any else static_bytes(plan, self.train, params, held=part)
            out[i] = sum(kept.values())
            if core.pp > 1:
                out[i] += gathered_bytes(plan, params, self.train)
        return out

    def keeps_activations(self, core: Core, inner: Inner, state: State) -> bool:
        """Whether activations stay on the device until their backward."""
        return not plan_of(core, inner, PLAIN, state).offload.activations

    def unscattered_bytes(self, core: Core, inner: Inner, state: State) -> np.ndarray:
        """Gradients of each unit [U] that accumulate whole in a round of a pipeline, the blocks alone."""
        plan = plan_of(core, inner, PLAIN, state)
        out = np.zeros(self.num_units)
        if core.pp > 1 and plan.layout.shards_gradients:
            stages = self.layers.stages(plan, self.layers.mesh(plan))
            for i, unit in enumerate(self.units[: self.kinds]):
                out[i] = unscattered_bytes(plan, stages.params(unit))
        return out


def _larger(steps: Steps, times: float) -> Steps:
    return tuple((op, size * times, group) for op, size, group in steps)
