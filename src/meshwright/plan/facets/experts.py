"""Experts: how a mixture's experts lie on ranks, and how evenly its router loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import (
    EXCHANGE,
    KEYED,
    LAYER,
    NUMBERED,
    PLACEMENT,
    Facet,
    Field,
    Form,
    count,
    divisors,
    listed,
    names,
    wrong,
)

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


DISPATCHES = ("sent", "gathered")


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Expert parallelism: ``ep`` ranks share the experts, ``etp`` ranks split each expert (0: as ``tp``).

    The expert mesh is its own factorisation of tp*cp*dp (Megatron-Core's parallel folding, 2504.14960).
    ``imbalance`` is tokens of the busiest rank over the mean (1 = balanced router). ``dispatch`` is of serving: tokens
    of groups with requests of their own (``adp``) go to their experts' ranks alone (``sent``), or all tokens to all
    ranks and the sums back (``gathered``); "" as it can: sent where each expert is on one rank.
    """

    ep: int = 1
    etp: int = 0
    imbalance: float = 1.0
    dispatch: str = ""


def _experts(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    ep, etp, layout = plan.experts.ep, plan.etp, plan.layout
    mixtures = model.mixtures
    if not mixtures:
        if ep > 1 or plan.experts.etp > 1:
            yield wrong("P017", f"{model.name} has no experts", f"experts.ep = {ep}", "drop ep and etp")
        return
    if layout.tp > 1 and not layout.sp:
        yield wrong(
            "P017",
            "a mixture of experts under tensor parallelism dispatches sequence shards",
            "layout.sp = False",
            "drop nosp",
        )
    for spec in mixtures:
        if spec.experts % ep:
            yield wrong(
                "P017",
                f"ep={ep} does not divide num_experts={spec.experts} ({model.name})",
                f"experts.ep = {ep}",
                f"valid ep: {listed(spec.experts, cluster.num_devices)}",
            )
        if spec.ffn % etp:
            yield wrong(
                "P017",
                f"etp={etp} does not divide the expert width {spec.ffn} ({model.name})",
                f"experts.etp = {etp}",
                f"valid etp: {listed(spec.ffn, layout.tp * layout.cp * layout.dp)}",
            )
    inner = layout.tp * layout.cp * layout.dp
    if inner % (ep * etp):
        yield wrong(
            "P018",
            f"ep{ep} * etp{etp} = {ep * etp} does not divide tp*cp*dp = {inner}: the expert mesh refactors those ranks",
            f"experts.ep = {ep}",
            f"valid ep at etp={etp}: {listed(inner // etp, inner) if inner % etp == 0 else 'none'}",
        )


def _spread(model: Model, cluster: Cluster, train: Train) -> tuple[int, ...]:
    mixtures = model.mixtures
    return tuple(
        n for n in divisors(cluster.num_devices) if mixtures and all(m.experts % n == 0 for m in mixtures)
    ) or (1,)


def _ratio(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 1.0 <= value < 1e6 else None


FIELDS = (
    Field(
        name="ep",
        help="expert parallelism",
        form=count(),
        spelled=NUMBERED,
        place=60,
        decides=(LAYER, EXCHANGE, PLACEMENT),
        size=True,
        domain=_spread,
    ),
    Field(
        name="etp",
        help="ranks that split each expert (0: as tp)",
        form=count(0),
        spelled=NUMBERED,
        place=70,
        decides=(LAYER, EXCHANGE, PLACEMENT),
        size=True,
        domain=lambda model, cluster, train: (1, 0) if model.mixtures else (0,),
    ),
    Field(
        name="imbalance",
        help="load of the busiest expert rank over the mean",
        form=Form(
            read=_ratio,
            write=lambda value: repr(value).removesuffix(".0"),
            wanted="a ratio of at least 1",
            ordered=True,
            kind=float,
        ),
        spelled=KEYED,
        place=240,
        decides=(LAYER,),
    ),
    Field(
        name="dispatch",
        help="tokens of attention's groups to experts: sent to those that want them, or gathered by all",
        form=names(*DISPATCHES),
        spelled=KEYED,
        place=245,
        decides=(LAYER,),
        serving=True,
        served=lambda model, cluster: ("", *DISPATCHES) if model.mixtures else ("",),
    ),
)
FACET = Facet(
    name="experts",
    help="expert parallelism, and how evenly experts are loaded",
    record=Experts,
    fields=FIELDS,
    rules=(_experts,),
)
