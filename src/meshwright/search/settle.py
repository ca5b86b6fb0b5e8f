"""Settle: a point of the space as a plan, with what it leaves to an assignment: layers of each stage, batch shares.

Both are worked out from the layers' prices on the devices they would run on. What is too much for memory, and what the
schedule makes of it, is found when the plan is evaluated.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright import schedules
from meshwright.lower.stages import Unit
from meshwright.plan import Plan
from meshwright.search.evaluate import Evaluator
from meshwright.search.partition import partition
from meshwright.search.shares import apportion
from meshwright.search.space import BALANCED, EVEN, Core, Inner, Piped, State, plan_of


def settled(core: Core, inner: Inner, piped: Piped, state: State, evaluator: Evaluator) -> Plan:
    """The plan at a point."""
    plan = plan_of(core, inner, concrete(core, inner, piped, evaluator), state)
    if inner.shares == BALANCED:
        layout = msgspec.structs.replace(plan.layout, shares=_shares(plan, evaluator))
        plan = msgspec.structs.replace(plan, layout=layout)
    return plan


def concrete(core: Core, inner: Inner, piped: Piped, evaluator: Evaluator) -> Piped:
    """The piped part with its layers dealt to stages. They are dealt by layers that recompute nothing and gather keys
    and values, so that parts that differ in no more than that have the same stages, and one bound."""
    if piped.stages != BALANCED:
        return piped
    usual = inner._replace(recompute="none", recompute_layers=0, algorithm="allgather", shares=EVEN)
    key = (core, usual, piped.vpp)
    stages = evaluator.stages.get(key)
    if stages is None:
        plan = plan_of(core, usual, Piped("gpipe", piped.vpp, EVEN), State(0, 0))
        stages = evaluator.stages[key] = _stages(plan, evaluator)
    return piped._replace(stages=stages)


class _Passes:
    """Seconds of forward and backward of a microbatch through a unit on each pipeline rank of each kind of slice."""

    def __init__(self, plan: Plan, evaluator: Evaluator):
        self.mesh = evaluator.layers.mesh(plan)
        self.book = evaluator.layers.book(plan, self.mesh)
        self.alike = len(evaluator.cluster.islands) == 1

    def __call__(self, unit: Unit, kind: int, rank: int) -> float:
        place = self.mesh.slices[kind]
        start = 0 if self.alike else place.starts[rank]
        return sum(self.book.unit(unit, which, place.devices[rank].name, start).seconds for which in ("F", "BW"))


def _stages(plan: Plan, evaluator: Evaluator) -> tuple[int, ...]:
    """Layers per stage; every kind of slice has the same, so a stage is as slow as on the slowest of them."""
    passes, model, pp = _Passes(plan, evaluator), evaluator.model, plan.layout.pp

    def seconds(kind: int | str, recompute: str, stage: int) -> float:
        unit = Unit(kind, recompute)
        return max(passes(unit, k, stage % pp) for k in range(len(passes.mesh.slices)))

    stages = range(plan.num_stages)
    blocks = range(len(model.blocks))
    table = np.array([[seconds(k, plan.memory.recompute, s) for k in blocks] for s in stages])
    return partition(
        table[:, list(model.pattern)],
        first=[seconds("embedding", "none", s) for s in stages],
        last=[seconds("head", "none", s) for s in stages],
    )


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
    family = schedules.get(pipeline.schedule)
    most = total // min(kind.multiplicity for kind in kinds)
    legal = [n for n in range(1, most + 1) if not family.legality(layout.pp, n, pipeline.vpp)]
    found = apportion(
        slowest.tolist(),
        ((seconds.sum(axis=1) - slowest) / pipeline.vpp).tolist(),
        [kind.multiplicity for kind in kinds],
        total,
        np.array(legal, np.int64),
    )
    return () if found is None or len(set(found)) == 1 else found
