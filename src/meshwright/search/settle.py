"""Settle: a point of the space as a plan, with what it leaves to an assignment: layers of each stage, batch shares,
shards of state.

Both are worked out from the layers' prices on the devices they would run on. What is too much for memory, and what the
schedule makes of it, is found when the plan is evaluated.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from meshwright import schedules
from meshwright.assign.level import level
from meshwright.assign.partition import partition
from meshwright.assign.shares import apportion
from meshwright.lower.residency import constant_bytes
from meshwright.lower.units import Unit
from meshwright.plan import Plan
from meshwright.search.evaluate import Evaluator
from meshwright.search.space import BALANCED, EVEN, Core, Inner, Piped, State, plan_of
from meshwright.spec.architecture import EMBEDDING, HEAD


def settled(core: Core, inner: Inner, piped: Piped, state: State, evaluator: Evaluator) -> Plan:
    """Return the plan at a point of the space, with the layers of each stage and the batch shares assigned."""
    plan = plan_of(core, inner, concrete(core, inner, piped, evaluator), state)
    if inner.shares == BALANCED:
        layout = msgspec.structs.replace(plan.layout, shares=_dealt(plan, evaluator))
        plan = msgspec.structs.replace(plan, layout=layout)
    if state.hold == BALANCED:
        own = msgspec.structs.replace(plan.kinds, hold=_held_by(plan, evaluator))
        plan = msgspec.structs.replace(plan, kinds=own)
    return plan


def _held_by(plan: Plan, evaluator: Evaluator) -> tuple[int, ...]:
    """Relative sizes of the shard of state on each kind of slices, by the room that the rest leaves its ranks; () where
    equal ones fit, or none do."""
    run, ranks = evaluator.simulated(plan)
    lowered, layout = run.lowered, plan.layout
    found = lowered.mesh.slices
    if len(found) == 1 or min(one.headroom_bytes for one in ranks) >= 0:
        return ()
    slack, parts = 1 + evaluator.costs.framework.allocator_slack, []
    whole = constant_bytes(lowered.stages, lowered.actions)
    bare = constant_bytes(lowered.stages, lowered.actions, 0.0)
    for index in range(len(found)):
        mine = range(index * layout.pp, (index + 1) * layout.pp)
        sharded = [slack * (sum(whole[r].values()) - sum(bare[r].values())) for r in mine]
        parts.append(min(1 + ranks[r].headroom_bytes / size for r, size in zip(mine, sharded) if size))
    return level(parts, [one.multiplicity for one in found]) or ()


def shares_of(core: Core, inner: Inner, piped: Piped, evaluator: Evaluator) -> tuple[int, ...]:
    """Microbatches of each kind of slice, which no state part changes; () where they are equal."""
    if inner.shares == BALANCED:
        return settled(core, inner, piped, State(), evaluator).layout.shares
    return () if inner.shares == EVEN else inner.shares


def _dealt(plan: Plan, evaluator: Evaluator) -> tuple[int, ...]:
    """Return the batch shares of a plan, assigned once for all plans that differ in ZeRO alone."""
    layout = msgspec.structs.replace(plan.layout, zero=0, shard=0)
    key = msgspec.structs.replace(plan, layout=layout)
    found = evaluator.stages.get(key)
    if found is None:
        found = evaluator.stages[key] = _shares(plan, evaluator)
    return found


@lru_cache(maxsize=1 << 16)
def dealt_by(inner: Inner) -> Inner:
    """Return the inner part by whose times layers are assigned to stages: `inner` with neither recompute nor shares,
    fp32 optimizer state, and keys and values gathered.

    Inner parts that differ in these words alone thus have the same stages, and one bound holds for all of them."""
    usual = {"recompute": "none", "recompute_layers": 0, "algorithm": "allgather", "shares": EVEN}
    return inner._replace(master="fp32", moments="fp32", **usual)


def concrete(core: Core, inner: Inner, piped: Piped, evaluator: Evaluator) -> Piped:
    """Return the piped part with its layers assigned to stages, by their times under :func:`dealt_by`."""
    if piped.stages != BALANCED:
        return piped
    usual = dealt_by(inner)
    key = (core, usual)
    table = evaluator.stages.get(key)
    if table is None:
        plan = plan_of(core, usual, Piped(schedule="gpipe"), State())
        table = evaluator.stages[key] = _by_rank(plan, evaluator)
    held = _held(piped.schedule, core.pp, piped.vpp)
    dealt = (held, table.tobytes())
    if dealt not in evaluator.stages:
        evaluator.stages[dealt] = _stages(table, held, evaluator)
    return piped._replace(stages=evaluator.stages[dealt])


def stages_of(plan: Plan, evaluator: Evaluator) -> tuple[int, ...]:
    """Return the layers of each stage of a plan, assigned so that the slowest stage is as fast as it can be."""
    held = _held(plan.pipeline.schedule, plan.layout.pp, plan.pipeline.vpp)
    return _stages(_by_rank(plan, evaluator), held, evaluator)


class _Passes:
    """Seconds of forward and backward of a microbatch through a unit on each pipeline rank of each kind of slice."""

    def __init__(self, plan: Plan, evaluator: Evaluator):
        self.mesh = evaluator.layers.mesh(plan)
        self.book = evaluator.layers.book(plan, self.mesh)
        self.alike = evaluator.alike

    def __call__(self, unit: Unit, kind: int, rank: int) -> float:
        place = self.mesh.slices[kind]
        start = 0 if self.alike else place.starts[rank]
        return sum(self.book.unit(unit, which, place.devices[rank].name, start).seconds for which in ("F", "BW"))


def _by_rank(plan: Plan, evaluator: Evaluator) -> np.ndarray:
    """Seconds [pp, U] of every kind of block, the embedding and the head on each pipeline rank; as every kind of slice
    has the same stages, on the slowest of them."""
    passes, blocks = _Passes(plan, evaluator), range(len(evaluator.trained.blocks))
    units = [*(Unit(kind, "none") for kind in blocks), Unit(EMBEDDING, "none"), Unit(HEAD, "none")]
    slices = range(len(passes.mesh.slices))
    return np.array([[max(passes(u, k, rank) for k in slices) for u in units] for rank in range(plan.layout.pp)])


@lru_cache(maxsize=4096)
def _held(schedule: str, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold each stage."""
    return schedules.get(schedule).ranks_of_stage(pp, vpp)


def _stages(table: np.ndarray, held: tuple[tuple[int, ...], ...], evaluator: Evaluator) -> tuple[int, ...]:
    """Layers per stage, from seconds by rank and the ranks that hold each stage; two of them share its microbatches."""
    each = np.array([table[list(ranks)].mean(axis=0) for ranks in held])
    return partition(each[:, list(evaluator.trained.pattern)], first=each[:, -2], last=each[:, -1])


@lru_cache(maxsize=256)
def _legal(schedule: str, pp: int, vpp: int, most: int) -> np.ndarray:
    """The numbers of microbatches up to `most` that a schedule can run."""
    family = schedules.get(schedule)
    return np.array([n for n in range(1, most + 1) if not family.legality(pp, n, vpp)], np.int64)


def _shares(plan: Plan, evaluator: Evaluator) -> tuple[int, ...]:
    """Microbatches of each kind of slice; () where whole microbatches that the schedule can run do not add up."""
    passes, layout, pipeline = _Passes(plan, evaluator), plan.layout, plan.pipeline
    kinds, train = passes.mesh.slices, evaluator.train
    total = train.global_batch // pipeline.microbatch
    even = total // layout.dp
    order = schedules.build(pipeline.schedule, layout.pp, even, pipeline.vpp)
    compositions = evaluator.layers.stages(plan, passes.mesh).compositions
    seconds = np.zeros((len(kinds), layout.pp))
    for stage, ranks in enumerate(order.stage_ranks):
        for kind in range(len(kinds)):
            for rank in ranks:
                spent = sum(passes(unit, kind, rank) for unit in compositions[stage].units)
                seconds[kind, rank] += spent / len(ranks)
    slowest = seconds.max(axis=1)
    most = total // min(kind.multiplicity for kind in kinds)
    found = apportion(
        slowest.tolist(),
        ((seconds.sum(axis=1) - slowest) / pipeline.vpp).tolist(),
        [kind.multiplicity for kind in kinds],
        total,
        _legal(pipeline.schedule, layout.pp, pipeline.vpp, most),
    )
    return () if found is None or len(set(found)) == 1 else found
