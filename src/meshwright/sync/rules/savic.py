"""SAVIC: local steps that are scaled by a diagonal which all replicas share, and which changes only when they average
(Chezhegov et al. 2406.00846).

The diagonal is the root of gathered squares of gradients, ``D^2 <- b D^2 + (1 - b) g^2``, as Adam and RMSProp have it;
at the end of a round each replica adds the squares of its last gradient, and the mean of all is the next round's. No
element of it is taken for smaller than ``least``. ``b`` begins at 0 and grows to ``beta`` as Adam's correction has it;
in the first round, before there is a gradient, steps are plain. With ``of=curvature`` the diagonal is that of the
Hessian, ``D <- b D + (1 - b) v * H v`` for a vector v of random signs, whose magnitude scales (OASIS, Jahani et al.
2109.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.fragments import MOMENTS, PARAMETERS, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption
from meshwright.sync.record import SharedScales
from meshwright.sync.rules.local import LOCAL

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy

SQUARES, CURVATURE = "squares", "curvature"


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Parameters of local steps and the diagonal of their scales to their means."""
    return LOCAL.fragments(plan, policy, weights, stored._replace(num_moments=1, moments=stored.masters))


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of local steps in scales that are averaged with the parameters."""
    return {
        "when": values["h"],
        "fragments": (PARAMETERS, MOMENTS),
        "codec": values["codec"],
        "scaling": SharedScales(
            beta=values["beta"], least=values["least"], apart=values["apart"] if values["of"] == CURVATURE else 0.0
        ),
    }


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts of no local steps, and replicas whose ranks do not hold the whole model, of whose curvature."""
    yield from LOCAL.wrong(plan, cluster, policy)
    layout = plan.layout
    split = [f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "shard") if getattr(layout, axis) > 1]
    if policy.scaling.apart and split:
        yield Diagnostic(
            code="Y003",
            message=f"signs for the curvature are drawn on ranks that hold the whole model, and {split[0]} divides it",
            place=f"plan.sync.policy = {policy.text}",
            help=f"drop {split[0]}, or say of=squares",
        )


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
        RuleOption(
            name="of",
            what="whether scales are of squares of gradients or of the Hessian's diagonal",
            default=SQUARES,
            choices=lambda: (SQUARES, CURVATURE),
        ),
        RuleOption(
            name="apart", what="how far to both sides gradients are taken for curvature", default=1e-3, share=True
        ),
        RuleOption(name="least", what="the smallest that a scale is taken for", default=1e-8, share=True, most=1e3),
    ),
    choices=choices,
    fragments=fragments,
    wrong=wrong,
)

RULES = (SAVIC,)
