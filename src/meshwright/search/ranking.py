"""The best plans in order, with their predictions: the fastest first, other spellings of a plan beside it."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.plan import Plan, check
from meshwright.search.evaluate import Evaluator
from meshwright.search.families import family_of
from meshwright.search.found import WITHIN, Ranked, Variant, delta
from meshwright.search.space import gathers_once
from meshwright.search.ties import same_work, simplicity, tie
from meshwright.search.walk import Tried, Walk
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate


def ranked(best: list[Tried], top: int, walk: Walk) -> tuple[Ranked, ...]:
    """The first `top` of `best`, which are in order, with their predictions; where families are wanted the first of
    each of the first `top` families, the others of it beside it. The order stays: what was proven of the first one is
    what is shown first. Those that cannot be told from it say so."""
    if not best:
        return ()
    evaluator, families = walk.evaluator, walk.wanted.families
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    runs = _Runs(evaluator)
    best, also = _collapsed(best, runs)
    groups: dict[Any, list[Tried]] = {}
    for t in best:
        groups.setdefault(family_of(t.plan) if families else t.plan, []).append(t)
    first = runs[best[0].plan]
    out: list[Ranked] = []
    for t, *others in list(groups.values())[:top]:
        prediction = predict(*asked, t.plan, costs=evaluator.costs, detail=False)
        out.append(
            Ranked(
                plan=t.plan,
                prediction=prediction,
                tie=tie(runs[t.plan], first) if out else None,
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


class _Runs(dict):
    """Simulated plans, each when it is first asked for."""

    def __init__(self, evaluator: Evaluator):
        super().__init__()
        self._evaluator = evaluator

    def __missing__(self, plan: Plan) -> Simulated:
        e = self._evaluator
        found = self[plan] = simulate(plan, e.model, e.cluster, e.train, e.costs)
        return found


def _collapsed(best: list[Tried], runs: _Runs) -> tuple[list[Tried], dict[Plan, list[str]]]:
    """Return the plans, the simplest spelling of each, and the words of the other spellings."""
    kept: list[Tried] = []
    also: dict[Plan, list[str]] = {}
    for t in sorted(best, key=lambda t: (t.step_time_s, *simplicity(t.plan))):
        twin = next((k for k in kept if _alike(k, t) and same_work(runs[k.plan], runs[t.plan])), None)
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
