"""DeDLOC: gradients are summed in every step by parts, of which peers with wide links take more and others none.

Diskin et al. (2106.10207) divide the averaging among volunteers by a linear program over their bandwidths: between
equal peers it is an all-reduce, with one wide link a parameter server. The program here is the one of the authors'
library (hivemind, ``averaging/load_balancing.py``): the bytes through the busiest port are the fewest. A prediction
solves it on the cluster (``simulate/divide.py``) and prints the plan with ``sums=``. Which peer computes how much
of the batch is ``shares=``; auxiliary peers (``aux=``), the last ones, compute nothing of it: they make parts of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.divided import read
from meshwright.sync.fragments import Fragment, Stored, Weights, gradients
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule, step

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients summed over all replicas in every step, each a part of them."""
    if weights.trained:
        yield msgspec.structs.replace(gradients(plan, weights, stored), sums=policy.sums, helpers=policy.helpers)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans whose replicas do not all sum the same gradients, and parts of another number of them."""
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.cp
    if replicas < 2:
        yield _bad("sums are divided among replicas, and the plan has one", f"layout.dp = {layout.dp}", "give it dp2")
    if layout.zero or layout.shard:
        place = f"layout.zero = {layout.zero}, layout.shard = {layout.shard}"
        yield _bad(
            "ranks of sharded states have the parts of a sum that they shard", place, "drop the sharding, or sync"
        )
    if plan.experts.ep > 1 or plan.etp != layout.tp:
        message = "experts have other copies than the rest, and a sum is divided among all"
        yield _bad(message, f"experts.ep = {plan.experts.ep}", "drop ep and etp, or sync")
    if policy.helpers:
        found = []
        if policy.helpers >= layout.dp:
            message = f"aux={policy.helpers} of {layout.dp} replicas leave none that trains"
            found.append((message, f"layout.dp = {layout.dp}", f"say at most aux={layout.dp - 1}"))
        if layout.pp > 1 or layout.cp > 1:
            place = f"layout.pp = {layout.pp}, layout.cp = {layout.cp}"
            found.append(
                ("peers that only sum have no stage, nor tokens of a sequence", place, "say pp1 and cp1, or drop aux")
            )
        if layout.shares or plan.kinds.computed:
            found.append(("shares= says what every replica has of a batch", "layout.shares", "drop shares, or aux"))
        for one in found:
            yield _bad(*one)
    if policy.sums and len(policy.sums) != replicas:
        message = f"sums={policy['sums']} are the parts of {len(policy.sums)} replicas, and the plan has {replicas}"
        yield _bad(message, f"layout.dp = {layout.dp}", "say a part for each, 0 for none; left out, a prediction does")


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync=dedloc", help=help)


DEDLOC = SyncRule(
    name="dedloc",
    title="sums divided by the peers' links",
    paper="Diskin et al., 2021, arXiv 2106.10207",
    exact=True,
    choices=lambda values: step.sums("sums", read(values["sums"])),
    fragments=fragments,
    options=(
        RuleOption(
            name="sums",
            what="the part of every sum that each replica makes; left out, a prediction divides them by their links",
            default="",
            parted=True,
        ),
        RuleOption(
            name="aux", what="replicas, the last ones, that sum and have no part of the batch", default=0, least=0
        ),
    ),
    opens=("which part of the sums each replica makes", "sums=3/1x2/0"),
    together=lambda plan: plan.layout.dp * plan.layout.cp,
    wrong=wrong,
)

RULES = (DEDLOC,)
