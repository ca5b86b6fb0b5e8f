"""The quadratic synchronisation rule: local steps whose rounds grow as the learning rate falls.

Replicas average their parameters as under ``local``, after ``max(h, floor((growth / rate)^2))`` steps, so that most
exchanges are in the early part of a run (Gu et al. 2310.14423). The rule needs the run's schedule: the prediction is
the mean over all of it, and a run takes its learning rates from here.
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.decay import SCHEDULES
from meshwright.sync.growing import GrowingRounds
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.local import LOCAL, choices, fragments, together, wrong

OPTIONS = (
    RuleOption(name="h", what="the fewest local steps of a round", example=4),
    RuleOption(
        name="growth",
        what="the learning rate at which a round would have one step; its square over the rate's is a round's steps",
        example=0.0175,
        share=True,
        most=1e6,
    ),
    RuleOption(name="rate", what="the highest learning rate of the run", example=0.008, share=True, most=1e6),
    RuleOption(name="steps", what="the steps of the run", example=93000),
    RuleOption(name="warmup", what="the steps in which the learning rate rises", default=0, least=0),
    RuleOption(
        name="floor", what="what is left of the learning rate at the end", default=0.0, share=True, least=0, most=1.0
    ),
    RuleOption(name="falls", what="the way in which it falls", default="cosine", choices=lambda: SCHEDULES),
)


def grown(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of local steps, and how their rounds grow."""
    growth = GrowingRounds(
        least=values["h"],
        growth=values["growth"],
        peak=values["rate"],
        steps=values["steps"],
        warmup=values["warmup"],
        floor=values["floor"],
        schedule=values["falls"],
    )
    return choices(values) | {"growth": growth}


QSR = SyncRule(
    name="qsr",
    title="local steps that grow as the learning rate falls",
    paper="Gu et al., 2024, arXiv 2310.14423",
    exact=False,
    options=(*OPTIONS, *(option for option in LOCAL.options if option.name != "h")),
    choices=grown,
    fragments=fragments,
    together=together,
    wrong=wrong,
)

RULES = (QSR,)
