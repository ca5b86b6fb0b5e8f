"""Experts in an answer: how the busiest rank is loaded, what is dropped, and what a placement could not get below."""

from __future__ import annotations

import msgspec

from meshwright.answer.expert_metrics import ExpertAnswer
from meshwright.answer.prediction import Assumption
from meshwright.layers.routed import node_of, placement
from meshwright.lower import Lowered
from meshwright.plan import Plan
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def expert_answer(lowered: Lowered, model: Model, train: Train, plan: Plan) -> ExpertAnswer | None:
    """Return how experts are loaded under a plan of one pool; None where nobody said how tokens are routed, or drops
    none."""
    if not model.mixtures or (train.routing is None and not plan.experts.capacity):
        return None
    context, spec = lowered.stages.context(), model.mixtures[0]
    group, load = context.ep_group, context.load(spec)
    found = ExpertAnswer(busiest=load.busiest, dropped=1.0 - load.kept)
    if group.size == 1:
        return found
    layers = len(model.routed_layers)
    lie = placement(train.routing, layers, spec.experts, plan.experts.placement, group.size, node_of(group))
    return msgspec.structs.replace(
        found,
        busiest_bound=lie.busiest_bound,
        leave_rank=lie.leave_rank,
        leave_node=lie.leave_node,
        leave_rank_bound=lie.leave_rank_bound,
        leave_node_bound=lie.leave_node_bound,
        hot=load.hot,
        solved=lie.solved,
    )


def expert_assumptions(found: ExpertAnswer | None, train: Train, plan: Plan) -> tuple[Assumption, ...]:
    """Return what an answer assumes of experts: their load and where it comes from, and what is dropped."""
    if found is None:
        return ()
    experts, source = plan.experts, "an even router" if train.routing is None else f"routing={train.routing.text()}"
    if experts.ep > 1:
        source += f", placement={experts.placement}: none without copies gets below {found.busiest_bound:.2f}x"
    out = [Assumption("expert load", f"busiest rank {found.busiest:.2f}x the mean", source)]
    if experts.capacity:
        share = f"{found.dropped:.1%} of tokens' copies"
        out.append(Assumption("dropped by experts", share, f"capacity={experts.capacity:g} of each rank's microbatch"))
    if experts.ep > 1 and train.routing is not None:
        value = f"{found.leave_rank:.0%} to another rank, {found.leave_node:.0%} to another node"
        least = f"at least {found.leave_rank_bound:.0%} and {found.leave_node_bound:.0%} under any placement"
        out.append(Assumption("tokens between layers' experts", value, least))
        if found.solved:
            out.append(Assumption("experts' clusters and ranks", found.solved, f"placement={experts.placement}"))
    return tuple(out)


def expert_cautions(found: ExpertAnswer | None, plan: Plan) -> tuple[str, ...]:
    """A caution where tokens are dropped."""
    if found is None or found.dropped <= 0:
        return ()
    return (f"capacity={plan.experts.capacity:g} is approximate: {found.dropped:.1%} of tokens' copies are dropped",)
