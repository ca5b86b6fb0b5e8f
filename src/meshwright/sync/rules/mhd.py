"""Multi-headed distillation: replicas teach each other by what their heads predict of public text (Zhmoginov et al.
2211.15774). What is learnt by whom is in ``sync/taught.py``; who meets whom is a graph, as under gossip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic
from meshwright.sync import groups
from meshwright.sync.fragments import EVERY, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption
from meshwright.sync.record import GRAPH
from meshwright.sync.rules import SyncRule, local
from meshwright.sync.taught import Taught

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of heads that neighbours teach: nothing of parameters is exchanged."""
    said = {name: values[name] for name in ("heads", "public", "aux", "embed", "top")}
    return {"fragments": (), "combine": "mean", "own_data": True, "taught": Taught(**said)}


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Local steps' fragments inside a replica; none between replicas, whose predictions are exchanged by the step."""
    return (f for f in local.fragments(plan, policy, weights, stored) if f.due != EVERY)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans without replicas of their own, and graphs in parts that never meet."""
    yield from local.wrong(plan, cluster, policy)
    yield from local.unmet(plan, policy, groups.refusal, "have no neighbours who teach them")


MHD = SyncRule(
    name="mhd",
    title="heads that neighbours teach",
    paper="Zhmoginov et al., 2022, arXiv 2211.15774",
    exact=False,
    options=(
        RuleOption(name="heads", what="heads besides the main one", default=2),
        RuleOption(
            name="public", what="the share of the text, its last one, that all replicas see", example=0.1, share=True
        ),
        RuleOption(name=GRAPH, what="who meets whom", default=groups.RING.name, choices=lambda: tuple(groups.graphs())),
        RuleOption(name="aux", what="the weight of the losses of further heads", default=1.0, share=True, most=1e3),
        RuleOption(
            name="embed",
            what="the weight of the squared distance of normalised hidden states from each neighbour's",
            default=1.0,
            least=0,
            share=True,
            most=1e3,
        ),
        RuleOption(
            name="top", what="the likeliest tokens that are sent of each prediction; 0: all", default=0, least=0
        ),
    ),
    choices=choices,
    fragments=fragments,
    together=local.together,
    wrong=wrong,
)

RULES = (MHD,)
