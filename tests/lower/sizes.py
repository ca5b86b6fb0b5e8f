"""Sizes of a plan's ranks without a cluster: groups that are as large as the plan says and join nothing."""

from __future__ import annotations

from meshwright.layers.pieces import Context
from meshwright.lower.state import params_of
from meshwright.work import Group


def context(plan, model, train) -> Context:
    """The context that builders of pieces are given, on ranks that all lie together."""
    layout = plan.layout
    cp = (plan.head_swap, layout.cp // plan.head_swap)
    inner = plan.experts.ep_inner
    sizes = (layout.tp, *cp, plan.experts.ep, plan.etp, inner, plan.experts.ep // inner)
    names = ("tp_group", "cp_inner", "cp_outer", "ep_group", "etp_group", "ep_inner", "ep_outer")
    groups = {name: Group(size=size, hops=()) for name, size in zip(names, sizes, strict=True)}
    return Context.of(model.head.stream, train.microbatch(plan.pipeline.microbatch), model, plan, train, **groups)


def block_params(plan, model, train, kind):
    """Parameters of a block of a kind on one rank."""
    block = model.blocks[kind]
    return params_of(context(plan, model, train).at(block.stream), block)
