"""The best plans in order, with their predictions: the fastest first, other spellings of a plan beside it."""

from __future__ import annotations

import msgspec

from meshwright.plan import Plan, check
from meshwright.predict import predict, simulate
from meshwright.search.evaluate import Evaluator
from meshwright.search.found import Ranked, delta
from meshwright.search.space import Space, gathers_once
from meshwright.search.ties import same_work, simplicity, tie
from meshwright.search.walk import Tried
from meshwright.simulate.simulated import Simulated


def ranked(best: list[Tried], top: int, evaluator: Evaluator, space: Space) -> tuple[Ranked, ...]:
    """The first `top` of `best`, which are in order, with their predictions. The order stays: what was proven of the
    first one is what is shown first. Those that cannot be told from it say so."""
    if not best:
        return ()
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    runs = {t.plan: simulate(t.plan, *asked, evaluator.costs) for t in best}
    best, also = _collapsed(best, runs)
    first = runs[best[0].plan]
    out: list[Ranked] = []
    for t in best[:top]:
        prediction = predict(*asked, t.plan, costs=evaluator.costs, detail=False)
        why = tie(runs[t.plan], first) if out else None
        changes = delta(out[-1].prediction, prediction) if out else ""
        words = (*also[t.plan], *_sharded_too(t, evaluator, space))
        out.append(Ranked(plan=t.plan, prediction=prediction, tie=why, delta=changes, also=words))
    return tuple(out)


def _collapsed(best: list[Tried], runs: dict[Plan, Simulated]) -> tuple[list[Tried], dict[Plan, list[str]]]:
    """The plans without other spellings of them, the simplest of each; and the words of those others."""
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


def _sharded_too(tried: Tried, evaluator: Evaluator, space: Space) -> list[str]:
    """ZeRO-3 where the space leaves it out because under this pipeline it is ZeRO-1 in other words."""
    plan, train = tried.plan, evaluator.train
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
