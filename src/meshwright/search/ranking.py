"""The best plans in order, with their predictions: the fastest first, other spellings of a plan beside it."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.plan import Plan, check
from meshwright.search.draws import SharedDraws, standings
from meshwright.search.families import family_of
from meshwright.search.found import WITHIN, Ranked, Variant, delta
from meshwright.search.space import gathers_once
from meshwright.search.ties import same_work, simplicity
from meshwright.search.walk import Tried, Walk


def ranked(best: list[Tried], top: int, walk: Walk, shared: SharedDraws) -> tuple[Ranked, ...]:
    """The first `top` of `best`, which are in order, with their predictions; where families are wanted the first of
    each of the first `top` families, the others of it beside it. The order stays: what was proven of the first one is
    what is shown first. Each says how it stands under the `shared` draws, and those that cannot be told from the first
    say so."""
    if not best:
        return ()
    evaluator, families = walk.evaluator, walk.wanted.families
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    best, also = _collapsed(best, shared)
    groups: dict[Any, list[Tried]] = {}
    for t in best:
        groups.setdefault(family_of(t.plan) if families else t.plan, []).append(t)
    first = best[0].plan
    shown = list(groups.values())[:top]
    found = standings([shared.of(t.plan, t.headroom_bytes) for t, *_ in shown])
    out: list[Ranked] = []
    for (t, *others), standing in zip(shown, found):
        prediction = predict(*asked, t.plan, costs=evaluator.costs, detail=False)
        out.append(
            Ranked(
                plan=t.plan,
                prediction=prediction,
                tie=shared.tie(t.plan, first) if out else None,
                standing=standing,
                delta=delta(out[-1].prediction, prediction) if out else "",
                also=(*also[t.plan], *_sharded_too(t, walk)),
                family=family_of(t.plan).text(),
                variants=tuple(
                    Variant(plan=o.plan, step_time_s=o.step_time_s, headroom_bytes=o.headroom_bytes)
                    for o in others
                    if o.step_time_s <= t.step_time_s * (1 + WITHIN)
                ),
            )
        )
    return tuple(out)


def _collapsed(best: list[Tried], shared: SharedDraws) -> tuple[list[Tried], dict[Plan, list[str]]]:
    """Return the plans, the simplest spelling of each, and the words of the other spellings."""
    kept: list[Tried] = []
    also: dict[Plan, list[str]] = {}
    for t in sorted(best, key=lambda t: (t.step_time_s, *simplicity(t.plan))):
        twin = next((k for k in kept if _alike(k, t) and same_work(shared.run(k.plan), shared.run(t.plan))), None)
        if twin is None:
            kept.append(t)
            also[t.plan] = []
        else:
            also[twin.plan].append(_instead(twin.plan, t.plan))
    return kept, also


def _sharded_too(tried: Tried, walk: Walk) -> list[str]:
    """ZeRO-3 where the space leaves it out because under this pipeline it is ZeRO-1 in other words; not where it is
    asked for an engine, which may take the one and not the other."""
    evaluator, space = walk.evaluator, walk.space
    plan, train = tried.plan, evaluator.train
    if walk.wanted.runnable is not None:
        return []
    if plan.layout.zero != 1 or plan.layout.pp == 1 or 3 not in space["zero"] or not gathers_once(space, train):
        return []
    twin = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, zero=3))
    if check(twin, evaluator.model, evaluator.cluster, train):
        return []
    return [_instead(plan, twin)] if _alike(tried, Tried(twin, *evaluator(twin))) else []


def _alike(a: Tried, b: Tried) -> bool:
    """Equal times, and memory equal up to the rounding of its sum."""
    return a.step_time_s == b.step_time_s and abs(a.headroom_bytes - b.headroom_bytes) < 1


def _instead(plan: Plan, other: Plan) -> str:
    mine = plan.text().split()
    return " ".join(word for word in other.text().split() if word not in mine)
