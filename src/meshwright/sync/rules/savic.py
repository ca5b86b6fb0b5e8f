"""SAVIC: local steps that are scaled by a diagonal which all replicas share, and which changes only when they average
(Chezhegov et al. 2406.00846).

The diagonal is the root of gathered squares of gradients, ``D^2 <- b D^2 + (1 - b) g^2``, as Adam and RMSProp have it;
at the end of a round each replica adds the squares of its last gradient, and the mean of all is the next round's. No
element of it is taken for smaller than ``least``. ``b`` begins at 0 and grows to ``beta`` as Adam's correction has it;
in the first round, before there is a gradient, steps are plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.sync.fragments import MOMENTS, PARAMETERS, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption
from meshwright.sync.record import SharedScales
from meshwright.sync.rules.local import LOCAL

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Parameters of local steps and the diagonal of their scales to their means."""
    return LOCAL.fragments(plan, policy, weights, stored._replace(num_moments=1, moments=stored.masters))


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of local steps in scales that are averaged with the parameters."""
    return {
        "when": values["h"],
        "fragments": (PARAMETERS, MOMENTS),
        "codec": values["codec"],
        "scaling": SharedScales(beta=values["beta"], least=values["least"]),
    }


SAVIC = msgspec.structs.replace(
    LOCAL,
    name="savic",
    title="local steps in shared scales",
    paper="Chezhegov et al., 2024, arXiv 2406.00846",
    optimizer="sgd",
    options=(
        *(option for option in LOCAL.options if option.name != "moments"),
        RuleOption(
            name="beta", what="the part of gathered squares that a round keeps", default=0.999, share=True, most=0.9999
        ),
        RuleOption(name="least", what="the smallest that a scale is taken for", default=1e-8, share=True, most=1e3),
    ),
    choices=choices,
    fragments=fragments,
)

RULES = (SAVIC,)
