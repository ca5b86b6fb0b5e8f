"""Families: plans that split the work alike, of which a reader wants the best and the number of the others.

Two plans are of one family when they have the same sizes of tensor, pipeline, context, data and expert parallelism,
the same ZeRO stage and the same pipeline schedule: what decides which collectives run and how a model is sharded. What
is left (chunks, microbatch, recompute, order of the axes, how context parallelism exchanges, the scope of what is
sharded) is tuned within a family without changing how weights and checkpoints are laid out between ranks, but for the
chunks; measured differences between those are mostly within what the costs are unsure of.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.plan import Plan
from meshwright.search.space import Core, Piped, State


class PlanFamily(NamedTuple):
    """Parallel sizes, ZeRO stage and pipeline schedule that all plans of a family share."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    zero: int
    schedule: str

    def text(self) -> str:
        """``tp2 pp4 cp4 dp2 zero1 interleaved``: words of a plan."""
        sizes = [f"{name}{n}" for name, n in zip(self._fields, self[:5]) if n > 1]
        zero = "fsdp" if self.zero == 3 else f"zero{self.zero}" if self.zero else "zero0"
        return " ".join([*sizes, zero, *([self.schedule] if self.schedule else [])])


def family(core: Core, piped: Piped, state: State) -> PlanFamily:
    """The family of a point."""
    schedule = piped.schedule if core.pp > 1 else ""
    return PlanFamily(core.tp, core.pp, core.cp, core.dp, core.ep, state.zero, schedule)


def family_of(plan: Plan) -> PlanFamily:
    """The family of a plan with ``dp`` filled in."""
    layout = plan.layout
    schedule = plan.pipeline.schedule if layout.pp > 1 else ""
    return PlanFamily(layout.tp, layout.pp, layout.cp, layout.dp, plan.experts.ep, layout.zero, schedule)
