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
from meshwright.spec.routing import GIVEN, PLACEMENTS

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


DISPATCHES = ("sent", "gathered", "stays")
#: What ranks do that hold the same tokens: each sends its part to the experts, or each sends all.
DUPLICATES = ("dropped", "sent")


#: Hot experts are those that were chosen most in the step before.
STEP = "step"


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Expert parallelism: ``ep`` ranks share the experts, ``etp`` ranks split each expert (0: as ``tp``).

    The expert mesh is its own factorisation of tp*cp*dp (Megatron-Core's parallel folding, 2504.14960).
    ``imbalance`` is tokens of the busiest rank over the mean (1 = balanced router). ``dispatch`` is of serving: tokens
    of groups with requests of their own (``adp``) go to their experts' ranks alone (``sent``), or all tokens to all
    ranks and the sums back (``gathered``), or they stay with their first expert until the next layer's (``stays``:
    every rank has every request's keys and values, ExFlow, 2401.08383); "" as it can: sent where each expert is on one
    rank. ``placement`` says which experts lie on which of the ``ep`` ranks (:mod:`meshwright.assign.placing`). An
    expert takes ``capacity`` times its even share of a rank's tokens of a microbatch at most (0: all). The ``hot`` most
    chosen experts of every mixture are gathered on all ranks for each pass (Hecate's sparse materialisation,
    2502.02581): those that the routing names, or ``hot_by`` step those that were chosen most in the step before. Tokens
    go through the experts in so many ``portions``, one on its way while another is multiplied
    (Tutel, 2206.03382). Tensor-parallel ranks that all hold whole sequences (``nosp``) send each its part of the tokens
    and gather what comes back, so that ``duplicates`` are dropped (DeepSpeed-TED, 2303.06318), or they send all of
    them. Runs of ``ep_inner`` neighbouring ranks of ``ep``, such as those of a node, exchange tokens among themselves
    first, and then each rank with those at its place of the other runs (the hierarchical all-to-all of SE-MoE,
    2205.10034, and Tutel, 2206.03382): one message to each node and not to each of its ranks (1: all at once).
    """

    ep: int = 1
    etp: int = 0
    imbalance: float = 1.0
    dispatch: str = ""
    placement: str = "contiguous"
    capacity: float = 0.0
    hot: int = 0
    hot_by: str = "routing"
    portions: int = 1
    duplicates: str = "dropped"
    ep_inner: int = 1


def _experts(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    ep, etp, layout = plan.experts.ep, plan.etp, plan.layout
    mixtures = model.mixtures
    if not mixtures:
        if ep > 1 or plan.experts.etp > 1:
            yield wrong("P017", f"{model.name} has no experts", f"experts.ep = {ep}", "drop ep and etp")
        return
    length = train.seq_len // layout.cp
    if layout.tp > 1 and not layout.sp and plan.experts.duplicates == DUPLICATES[0] and length % layout.tp:
        yield wrong(
            "P017",
            f"each of tp={layout.tp} ranks sends its part of {length} tokens of a sequence to their experts",
            "layout.sp = False",
            "say duplicates=sent, or a sequence that divides",
        )
    if plan.experts.duplicates == "sent" and (layout.sp or layout.tp == 1 or etp != layout.tp):
        yield wrong(
            "P017",
            f"duplicates=sent with tp={layout.tp}, etp={etp}{', and shards of sequences' if layout.sp else ''}: "
            "ranks that hold the same tokens send all of them where each has a part of every expert",
            "experts.duplicates = sent",
            f"say nosp etp{layout.tp}, or drop duplicates" if layout.tp > 1 else "drop duplicates",
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


def _routed(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield what is wrong with how tokens are said to be routed, and with what a plan makes of it."""
    experts, routing, mixtures = plan.experts, train.routing, model.mixtures
    if not mixtures:
        for name in ("routing", "balance", "locality"):
            if getattr(train, name) or (name == "balance" and train.bias_rate):
                message = f"{name}= is about experts, and {model.name} has none"
                yield wrong("P070", message, f"experts.{name}", f"drop {name}= from the workload")
        yield from _two_levels(plan, model)
        return
    layers, counts = model.routed_layers, {spec.experts for spec in mixtures}
    if train.bias_rate and not any(spec.router_bias and not spec.bias for spec in mixtures):
        message = f"balance=bias moves the selection biases of routers, and those of {model.name} have none"
        yield wrong("P070", message, "experts.balance", "say balance=global, or a model such as deepseek-v3")
    if train.bias_rate and train.lora is not None:
        message = "balance=bias moves numbers of the model, and phase=lora leaves all of them as they are"
        yield wrong("P070", message, "experts.balance", "drop bias from balance=, or phase=lora")
    if routing is not None:
        known = f"{len(layers)} mixtures of {', '.join(map(str, sorted(counts)))} experts ({model.name})"
        if len(counts) > 1:
            yield wrong(
                "P070", f"mixtures of several sizes have no routing in common: {known}", "routing", "say imbalance="
            )
        elif not routing.fits(len(layers), *counts):
            held = f"routing={routing.said} has {routing.layers} layers of {routing.experts} experts"
            yield wrong("P070", f"{held}, and there are {known}", "routing", "record it with this model")
        if experts.imbalance != 1:
            said = f"experts.imbalance = {experts.imbalance:g}"
            yield wrong(
                "P071", "the load of the busiest rank is said twice: it follows from routing=", said, "drop one"
            )
    for name, value, usual in (("placement", experts.placement, "contiguous"), ("hot", experts.hot, 0)):
        if value != usual and routing is None:
            help = "add routing= (of serving expert_routing=) to the workload: meshwright explain expert_routing"
            yield wrong(
                "P071", f"{name}={value} needs to know how tokens are routed", f"experts.{name} = {value}", help
            )
    if experts.placement == GIVEN and routing is not None and routing.ranks != experts.ep:
        held = f"a placement on {routing.ranks} ranks" if routing.ranks else "no placement"
        message = f"routing={routing.said} has {held}, and the plan has ep={experts.ep}"
        yield wrong(
            "P071", message, f"experts.ep = {experts.ep}", f"say ep{routing.ranks}" if routing.ranks else "drop it"
        )
    if experts.portions > 1 and any(spec.shortcut for spec in mixtures):
        message = f"portions={experts.portions} in a model whose exchange of tokens runs beside attention"
        yield wrong("P073", message, f"experts.portions = {experts.portions}", "drop portions=")
    if experts.portions > 1 and plan.overlap.ep:
        message = f"portions={experts.portions} and overlap=ep both hide the exchange of experts' tokens"
        yield wrong("P073", message, f"experts.portions = {experts.portions}", "drop one of them")
    yield from _two_levels(plan, model)
    most = min(counts)
    if experts.hot and (experts.hot > most or experts.ep == 1):
        message = f"hot={experts.hot} experts on all of {experts.ep} ranks, of {most} experts"
        yield wrong("P071", message, f"experts.hot = {experts.hot}", f"at most {most}, with ep of 2 or more")
    if experts.hot_by == STEP and not experts.hot:
        yield wrong("P071", "hot_by=step chooses hot experts, and there are none", "experts.hot_by = step", "say hot=2")
    tokens = plan.pipeline.microbatch * train.seq_len // (plan.layout.cp * (plan.layout.tp if plan.layout.sp else 1))
    for spec in mixtures if experts.capacity else ():
        rows = experts.capacity * tokens * spec.top_k / spec.experts
        if rows < 1:
            yield wrong(
                "P072",
                f"capacity={experts.capacity:g} of {tokens} tokens a rank to {spec.top_k} of {spec.experts} experts is "
                f"{rows:.3g} of a token for each: none has room for one",
                f"experts.capacity = {experts.capacity:g}",
                f"at least {spec.experts / (tokens * spec.top_k):.3g}",
            )


def _two_levels(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield what keeps tokens from being exchanged inside runs of ranks first."""
    experts = plan.experts
    if experts.ep_inner == 1:
        return
    said = f"experts.ep_inner = {experts.ep_inner}"
    if experts.ep % experts.ep_inner or experts.ep_inner >= experts.ep:
        runs = [n for n in divisors(experts.ep) if 1 < n < experts.ep]
        message = f"ep_inner={experts.ep_inner} does not cut ep={experts.ep} ranks into two equal runs or more"
        help = f"valid ep_inner: {', '.join(map(str, runs))}" if runs else "drop ep_inner, or say ep4 or more"
        yield wrong("P017", message, said, help)
    shortcut = any(spec.shortcut for spec in model.mixtures)
    others = {f"portions={experts.portions}": experts.portions > 1, "overlap=ep": plan.overlap.ep}
    for other in [name for name, given in others.items() if given] + ["a shortcut around attention"] * shortcut:
        message = f"ep_inner={experts.ep_inner} exchanges tokens in two steps, of which {other} would hide one at most"
        yield wrong("P073", message, said, "drop one of them" if not shortcut else "drop ep_inner")


def _spread(model: Model, cluster: Cluster, train: Train) -> tuple[int, ...]:
    mixtures = model.mixtures
    return tuple(
        n for n in divisors(cluster.num_devices) if mixtures and all(m.experts % n == 0 for m in mixtures)
    ) or (1,)


def _capacity(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value < 1e6 else None


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
        name="placement",
        help="which experts lie on which ranks: by number, evened out, MoETuner's, ExFlow's, or as routing's file says",
        form=names(*PLACEMENTS, GIVEN),
        spelled=KEYED,
        place=246,
        decides=(LAYER,),
        useful=lambda plan: plan.experts.ep > 1,
    ),
    Field(
        name="capacity",
        help="tokens that an expert takes of each rank at most, over its even share (0: all)",
        form=Form(
            read=_capacity,
            write=lambda value: repr(value).removesuffix(".0"),
            wanted="a ratio above 0",
            ordered=True,
            kind=float,
        ),
        spelled=KEYED,
        place=247,
        decides=(LAYER,),
    ),
    Field(
        name="hot",
        help="most chosen experts of each mixture that are gathered on all ranks for a pass",
        form=count(0),
        spelled=KEYED,
        place=248,
        decides=(LAYER,),
    ),
    Field(
        name="hot_by",
        help="what says which experts are hot: the routing, or the choices of the step before",
        form=names("routing", STEP),
        spelled=KEYED,
        place=244,
        decides=(LAYER,),
        seen={LAYER: lambda plan: ""},
    ),
    Field(
        name="portions",
        help="portions of tokens that go through the experts, one on its way while another is multiplied",
        form=count(1, 64),
        spelled=KEYED,
        place=249,
        decides=(LAYER,),
        useful=lambda plan: plan.experts.ep > 1,
    ),
    Field(
        name="ep_inner",
        help="neighbouring ranks of ep that exchange tokens first, before those at one place of all such runs do",
        form=count(),
        spelled=KEYED,
        place=243,
        decides=(LAYER,),
        useful=lambda plan: plan.experts.ep > plan.experts.ep_inner,
    ),
    Field(
        name="duplicates",
        help="tokens that tensor-parallel ranks hold alike (nosp): each sends its part to experts, or all",
        form=names(*DUPLICATES),
        spelled=KEYED,
        place=251,
        decides=(LAYER,),
        useful=lambda plan: plan.layout.tp > 1 and not plan.layout.sp,
    ),
    Field(
        name="dispatch",
        help="tokens of attention's groups to experts: sent to those that want them, or gathered by all",
        form=names(*DISPATCHES),
        spelled=KEYED,
        place=245,
        decides=(LAYER,),
        serving=True,
        served=lambda model, cluster: ("", *DISPATCHES[:2]) if model.mixtures else ("",),
    ),
)
FACET = Facet(
    name="experts",
    help="expert parallelism, and how evenly experts are loaded",
    record=Experts,
    fields=FIELDS,
    rules=(_experts, _routed),
)
