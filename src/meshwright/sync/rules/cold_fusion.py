"""ColD Fusion: replicas train on text of their own and are fused by the mean of their parameters (Don-Yehiya et al.
2212.01378).

Local steps whose replicas have an equal run of the text each: contributors with data that nobody else has. With
``heads=own`` each keeps a head of its own, as those of different tasks do, and the rest is fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.sync.fragments import EVERY, HEADED, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption
from meshwright.sync.rules.local import LOCAL, OWN

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.sync.record import SyncPolicy

FUSED = "fused"


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Local steps' fragments, without an average of heads that replicas have for themselves."""
    for f in LOCAL.fragments(plan, policy, weights, stored):
        if weights.kind != HEADED or f.due != EVERY:
            yield f


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of local steps on data of each replica's own."""
    return LOCAL.choices(values) | {"own_data": True, "own_heads": values["heads"] == OWN}


COLD_FUSION = msgspec.structs.replace(
    LOCAL,
    name="cold-fusion",
    title="local steps on text of each replica's own",
    paper="Don-Yehiya et al., 2022, arXiv 2212.01378",
    options=(
        *LOCAL.options,
        RuleOption(
            name="heads",
            what="whether heads are averaged as all else is, or stay each replica's own",
            default=FUSED,
            choices=lambda: (FUSED, OWN),
        ),
    ),
    choices=choices,
    fragments=fragments,
)

RULES = (COLD_FUSION,)
