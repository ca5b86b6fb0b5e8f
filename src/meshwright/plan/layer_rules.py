"""Rules that the layers of a model set for a plan: how their kinds can be split, and streams of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from meshwright import layers
from meshwright.errors import Diagnostic
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.denoise import DENOISE
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=f"plan.{place}", help=help)


def _layers(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield the violations of the rules by which the model's kinds of layers can be split."""
    layout = plan.layout
    found = dict.fromkeys(rule for _, layer in model.all_layers for rule in layers.of(layer).rules(layer, plan, train))
    sizes = f"plan.layout = tp{layout.tp} pp{layout.pp} cp{layout.cp}"
    for message, help, *said in found:
        place = said[0] if said else sizes
        yield Diagnostic(code="P027", message=f"{message} ({model.name})", place=place, help=help)


def _streams(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Models of several streams of tokens, or of one that is not as long as the workload's sequences."""
    if not model.streams:
        return
    layout = plan.layout
    fixed = [flow for flow in model.flows if flow.tokens]
    if any(flow.scale for flow in model.flows):
        yield from _maps(plan, model, train)
        return
    if layout.cp > 1 and (len(model.flows) > 1 or fixed):
        names = " and ".join(f"{flow.name} tokens" for flow in model.flows)
        yield _bad(
            "P028",
            f"context parallelism cuts one sequence, and {model.name} has {names} of lengths of their own",
            f"layout.cp = {layout.cp}",
            "say cp1",
        )
    for flow in fixed:
        if layout.sp and layout.tp > 1 and flow.tokens % layout.tp:
            yield _bad(
                "P012",
                f"sequence parallelism shards {flow.tokens} {flow.name} tokens over tp={layout.tp}, no divisor",
                f"layout.tp = {layout.tp}",
                "say nosp",
            )


def _maps(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """P028 for maps whose rows ranks do not share alike, while images are made; otherwise they stay whole (P027)."""
    cp = plan.layout.cp
    if cp == 1 or train.phase != DENOISE:
        return
    sides = sorted({isqrt(flow.length(train.seq_len)) for flow in model.flows if flow.scale})
    if wrong := [side for side in sides if side % cp]:
        fit = [n for n in range(1, cp) if not any(side % n for side in sides)]
        yield _bad(
            "P028",
            f"cp={cp} ranks do not share the {wrong[0]} rows of a map of {model.name} alike",
            f"layout.cp = {cp}",
            f"valid cp for this image: {', '.join(map(str, fit))}; or another size=",
        )


RULES = (_layers, _streams)
