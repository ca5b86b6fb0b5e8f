"""The recommended plan: of those that the costs cannot tell from the fastest, the one with room that an engine runs.

The fastest plan by a percent may fill the last gibibyte, which no framework's allocator grants, or say what no engine
does. Among plans whose paired difference to it includes zero (:mod:`meshwright.search.draws`), and those that are
faster than one of these, nothing is known to be lost by taking one that leaves memory, that an engine runs, and that
is said in fewer words; or, where a robust one is asked for, the one that loses least in the worst of the draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.answer.risk import USUAL_RISK, fit_probability, room_bytes
from meshwright.plan import Plan
from meshwright.quantity import gibibytes
from meshwright.search.draws import PlanStanding, SharedDraws, standings
from meshwright.search.engines import Engine, Runnable
from meshwright.search.ties import simplicity
from meshwright.search.walk import Tried, Walk, Wanted

#: Memory that a plan should leave at least, where none as fast leaves the room of the risk: the share of a device that
#: fragmentation and libraries were seen to take unforeseen.
ROOM = 0.05
#: Plans slower than the fastest by more are not looked at: the paired intervals of plans that are tell them apart.
REACH = 1.03
#: Plans within this of the fastest eligible one are as good as it: of them the one in fewest words is taken, and of
#: those the one with most room, in steps of what is enough.
NEAR = 1.005
#: Plans looked for, and compared with the fastest at most.
KEEP, COMPARED = 4, 16


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """The plan to take, with ``why`` in one sentence; ``slower`` than the fastest by this share; the labels of the
    ``engines`` that run it, empty when none was asked about or none does; ``room_bytes`` it was to leave;
    ``regret_worst``: by how much its step is longer than the fastest's of those compared, in the worst draw."""

    plan: Plan
    prediction: Prediction
    why: str
    slower: float
    engines: tuple[str, ...]
    room_bytes: float
    regret_worst: float = 0.0


def wanted(main: Walk, engines: Sequence[Engine]) -> Wanted:
    """Return the target of a second search: the fastest plans with room that an engine runs, not much slower than the
    best."""
    asked = main.wanted
    runnable = asked.runnable or (Runnable(preferred(engines)) if engines else None)
    return Wanted(
        keep=KEEP,
        room_bytes=enough_bytes(main),
        cap_s=main.best_s * REACH,
        runnable=runnable,
        narrow=asked.narrow and runnable is asked.runnable,
    )


def preferred(engines: Sequence[Engine]) -> tuple[Engine, ...]:
    """The engines that a plan had better be run by: all but our own executor, unless there is no other."""
    return tuple(e for e in engines if not e.own) or tuple(engines)


def enough_bytes(main: Walk) -> float:
    """Return the bytes that the recommended plan leaves free: as asked for, else so many of the largest device that it
    runs out of memory with a probability of at most :data:`~meshwright.answer.risk.USUAL_RISK`."""
    capacity = main.capacity_bytes + main.wanted.room_bytes
    return main.wanted.room_bytes or room_bytes(USUAL_RISK, capacity, main.evaluator.costs.framework.memory_sigma)


def settled_already(main: Walk, engines: Sequence[Engine]) -> bool:
    """Whether the fastest is what would be recommended, so that nothing has to be looked for."""
    first = main.fitting()[0]
    return first.headroom_bytes >= enough_bytes(main) and (
        not engines or bool(Runnable(preferred(engines)).runs(first.plan))
    )


def recommended(
    main: Walk, others: Iterable[Tried], engines: Sequence[Engine], shared: SharedDraws, *, robust: bool = False
) -> Recommended:
    """The plan to take among what `main` found that fits and `others`; the fastest itself where nothing is better. If
    `robust`, the one with the least worst-case regret over the `shared` draws."""
    evaluator = main.evaluator
    found = {t.plan: t for t in (*main.fitting(), *others) if main.fits(t)}
    first, *behind = sorted(found.values(), key=lambda t: (t.step_time_s, *simplicity(t.plan)))
    ranked = sorted(behind, key=lambda t: (t.headroom_bytes < enough_bytes(main), t.step_time_s))[:COMPARED]
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    near_enough = [t for t in ranked if t.step_time_s <= first.step_time_s * REACH]
    stands = dict(zip([first, *near_enough], _standings([first, *near_enough], shared)))
    tied = [t for t in near_enough if stands[t].alike]
    slowest = max((t.step_time_s for t in tied), default=first.step_time_s)
    alike = [first, *(t for t in near_enough if t.step_time_s <= slowest)]
    enough = enough_bytes(main)
    if not any(t.headroom_bytes >= enough for t in alike):
        enough = min(enough, ROOM * (main.capacity_bytes + main.wanted.room_bytes))
    who = {t.plan: Runnable(engines).runs(t.plan) for t in alike}
    better = Runnable(preferred(engines))

    def lacking(t: Tried) -> tuple[bool, bool]:
        return t.headroom_bytes < enough, bool(engines) and not any(e in better.engines for e in who[t.plan])

    least = min(map(lacking, alike))
    good = [t for t in alike if lacking(t) == least]
    near = [t for t in good if t.step_time_s <= min(g.step_time_s for g in good) * NEAR]
    best = min(near, key=lambda t: (len(t.plan.text().split()), -(t.headroom_bytes // enough), t.step_time_s))
    if robust:
        best = min(good, key=lambda t: (stands[t].regret_worst, t.step_time_s, *simplicity(t.plan)))
    return Recommended(
        plan=best.plan,
        prediction=predict(*asked, best.plan, costs=evaluator.costs, detail=False),
        why="; ".join(
            [
                *_why(best, first, main),
                *(_least(stands[best], stands[first]) if robust else ()),
                *_who(best, first, ranked, who[best.plan], better),
                *_nobody(best, first, who[first.plan], engines),
            ]
        ),
        slower=best.step_time_s / first.step_time_s - 1,
        engines=tuple(e.label for e in who[best.plan]),
        room_bytes=enough_bytes(main),
        regret_worst=stands[best].regret_worst,
    )


def _standings(tried: Sequence[Tried], shared: SharedDraws) -> tuple[PlanStanding, ...]:
    return standings([shared.of(t.plan, t.headroom_bytes) for t in tried])


def _least(best: PlanStanding, first: PlanStanding) -> list[str]:
    """Return the worst-case regrets of the robust plan and of the fastest, in words."""
    worst = f"in the worst draw {best.regret_worst:.1%} slower than the fastest there"
    return [worst if best == first else f"{worst}, where the fastest by prediction is {first.regret_worst:.1%}"]


def _nobody(best: Tried, first: Tried, who: Sequence[Engine], engines: Sequence[Engine]) -> list[str]:
    """Say that the fastest plan is run by nobody, and why, where another is recommended."""
    if best.plan == first.plan or who or not engines:
        return []
    reasons = list(dict.fromkeys(Runnable(engines).reasons(first.plan)))
    return [f"nobody runs the fastest, {first.plan.text()} ({reasons[0]})"]


def _why(best: Tried, first: Tried, main: Walk) -> list[str]:
    """List the differences of the recommended plan from the fastest: step time, memory left, words of its text."""
    parts = []
    more = best.headroom_bytes - first.headroom_bytes
    if best.plan == first.plan:
        parts.append("the fastest")
    elif (slower := best.step_time_s / first.step_time_s - 1) < 0.0005:
        parts.append("as fast as the fastest to a tenth of a percent")
    else:
        parts.append(f"{slower:.1%} slower than the fastest, inside what the costs are unsure of")
    enough = enough_bytes(main)
    if best.headroom_bytes < enough:
        capacity = main.capacity_bytes + main.wanted.room_bytes
        sigma = main.evaluator.costs.framework.memory_sigma
        chance = fit_probability(capacity - best.headroom_bytes, capacity, sigma)
        left = f"leaves {gibibytes(best.headroom_bytes)}, less than the {gibibytes(enough)} one would want"
        parts.append(f"{left}: fits with a probability of {chance:.0%}")
    elif more >= 0.1 * 2**30:
        parts.append(f"{gibibytes(more)} more room")
    else:
        parts.append(f"leaves {gibibytes(best.headroom_bytes)}")
    words = len(first.plan.text().split()) - len(best.plan.text().split())
    if words > 0:
        parts.append(f"{words} word{'s' * (words > 1)} shorter")
    return parts


def _who(
    best: Tried, first: Tried, others: Iterable[Tried], engines: tuple[Engine, ...], better: Runnable
) -> list[str]:
    """Who runs it; where no preferred engine does, the fastest that was seen that one runs."""
    if not better.engines:
        return []
    parts = [
        f"{_listed([e.label for e in engines])} run{'s' * (len(engines) == 1)} it" if engines else "nobody runs it"
    ]
    if not any(e in better.engines for e in engines):
        runs = [t for t in others if better.runs(t.plan)]
        if runs:
            t = min(runs, key=lambda t: t.step_time_s)
            slower = t.step_time_s / first.step_time_s - 1
            label = _listed([e.label for e in better.runs(t.plan)])
            parts.append(f"{label} would run {t.plan.text()}, {slower:.1%} slower (--for)")
    return parts


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
