"""Ways of overlapping inside layers, tried on the plan that a search recommends.

A search leaves open how collectives inside layers are overlapped, since every way multiplies its space, and proves its
best plan without any. What a way is worth can be had for two simulations: an exact one computes the same, so the plan
to take says it where that is faster and an engine runs it. An approximate one is another model; it is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.answer.predict import predict
from meshwright.plan import Plan, check
from meshwright.plan.facets.overlap import AS_DECIDED
from meshwright.quantity import seconds as in_words
from meshwright.search.engines import Engine, Runnable
from meshwright.search.evaluate import Evaluated
from meshwright.search.recommend import NEAR, Recommended, preferred
from meshwright.search.walk import Walk

#: Ways that compute what the plain plan does, and those that do not.
EXACT, APPROXIMATE = ("", "domino"), ("ladder",)


def with_way(pick: Recommended, walk: Walk, engines: Sequence[Engine]) -> Recommended:
    """Return the recommended plan with the exact way of overlapping inside layers that is fastest, if one is and the
    space leaves it open; what an approximate one would save is named in ``why``."""
    plain = pick.plan
    if not any(AS_DECIDED in value for value in walk.space["overlap"]) or plain.several or plain.layout.tp == 1:
        return pick
    if plain.overlap.tp:
        return pick
    seconds = pick.prediction.step_time_s
    least = pick.prediction.tightest.headroom_bytes if pick.prediction.tightest.headroom_bytes < pick.room_bytes else 0
    exact = {plan: found for plan, found in _tried(plain, EXACT, walk).items() if found.headroom_bytes >= least}
    if engines:
        asked = Runnable(preferred(engines)) if pick.engines else Runnable(engines)
        exact = {plan: found for plan, found in exact.items() if asked.runs(plan)}
    best = min(exact, key=lambda plan: exact[plan].step_time_s, default=None)
    parts = [pick.why]
    if best is not None and exact[best].step_time_s * NEAR < seconds:
        saved = 1 - exact[best].step_time_s / seconds
        without = f"{in_words(seconds)} without it, {pick.why}"
        parts = [f"{_words(best)} gives the same numbers in {saved:.1%} less time: {without}"]
        prediction = predict(walk.model, walk.cluster, walk.train, best, costs=walk.evaluator.costs, detail=False)
        pick = msgspec.structs.replace(
            pick,
            plan=best,
            prediction=prediction,
            slower=(1 + pick.slower) * prediction.step_time_s / seconds - 1,
            engines=tuple(e.label for e in Runnable(engines).runs(best)),
        )
        seconds = prediction.step_time_s
    for plan, found in _tried(plain, APPROXIMATE, walk).items():
        if found.fits and found.step_time_s * NEAR < seconds:
            saved = 1 - found.step_time_s / seconds
            parts.append(f"{_words(plan)} is another model, to be trained so, and {saved:.1%} faster")
    return msgspec.structs.replace(pick, why="; ".join(parts))


def _tried(plain: Plan, ways: Sequence[str], walk: Walk) -> dict[Plan, Evaluated]:
    """The step times of a plan under some ways of overlapping inside layers, of those that are legal."""
    asked, found = (walk.model, walk.cluster, walk.train), {}
    for how in ways:
        overlap = msgspec.structs.replace(plain.overlap, tp=True, how=how)
        plan = msgspec.structs.replace(plain, overlap=overlap)
        if not check(plan, *asked):
            found[plan] = walk.evaluator(plan)
    return found


def _words(plan: Plan) -> str:
    """The word of a plan that says its overlap."""
    return next(word for word in plan.text().split() if word.startswith("overlap="))
