"""Objectives of a serving search: the order in which candidates are looked at, and when the others cannot win.

A rule appends its choices, the best of each layout, to a list that outlives it when somebody stops the search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from meshwright.quantity import latency
from meshwright.search.serving.apart import ApartSearch
from meshwright.search.serving.evaluate import rate_of
from meshwright.search.serving.found import BEYOND
from meshwright.search.serving.space import ServingCandidate
from meshwright.search.serving.walk import WORK, Line, ServingWalk

SAME = "fewer replicas of the same layout keep the objectives"
FEWER = "more replicas answer more"
ROOM = "keeps the objectives with less room than another engine setting on as many devices"


class Chosen(NamedTuple):
    """A candidate that may be shown, where it stands among the others, and ``why`` it would lose to a better one; the
    greatest factor on the rate of arrivals (``speed``) at which it keeps the objectives, where that was asked."""

    candidate: ServingCandidate
    order: tuple
    why: str
    speed: float | None = None
    variants: int = 0


Rule = Callable[[ServingWalk, list[Chosen], int], None]


def _plainness(candidate: ServingCandidate) -> tuple:
    """Fewer words first."""
    text = candidate.plan.text()
    engine = candidate.engine
    return (len(text.split()), text, engine.budget, engine.policy)


def fewest(walk: ServingWalk, chosen: list[Chosen], top: int) -> None:
    """Choose the candidates with the fewest devices that keep the objectives: all with fewer are looked at first."""
    _least(walk, chosen, top, lambda candidate: (candidate.num_devices,), "devices")


def cheapest(walk: ServingWalk, chosen: list[Chosen], top: int) -> None:
    """Choose the candidates that cost least an hour; all that cost less are looked at first."""
    price = [e.cluster.total_price_usd_hour() / e.cluster.num_devices for e in walk.evaluators]
    _least(walk, chosen, top, lambda c: (round(price[c.where] * c.num_devices, 9),), "dollars an hour")


def _least(walk: ServingWalk, chosen: list[Chosen], top: int, key: Callable, unit: str) -> None:
    levels: dict[tuple, list[tuple[Line, int]]] = defaultdict(list)
    for line in walk.lines:
        for count in line.counts:
            levels[key(line.at(count))].append((line, count))
    met: dict[tuple, float] = {}
    for level in sorted(levels):
        done = len(met) >= top
        good: dict[tuple, list[ServingCandidate]] = defaultdict(list)
        for line, count in levels[level]:
            candidate = line.at(count)
            if candidate.family in met:
                walk.lose(
                    candidate, SAME, f"the same layout keeps the objectives with {met[candidate.family]:g} {unit}"
                )
            elif done and not walk.roomless(line, count):
                walk.lose(candidate, BEYOND, f"{level[0]:g} {unit}, and the best needs {min(met.values()):g}")
            elif not done and not walk.excluded(line, count) and walk.judge(candidate).good:
                good[candidate.family].append(candidate)
        for family, some in good.items():
            some.sort(key=lambda c: (walk.judged[c].ratio, _plainness(c)))
            met[family] = level[0]
            for other in some[1:]:
                ratio, least = walk.judged[other].ratio, walk.judged[some[0]].ratio
                best = some[0].engine
                better = best.policy + (f",budget={best.budget}" if best.budget else "")
                walk.lose(
                    other,
                    ROOM,
                    f"keeps the objectives, its worst latency at {ratio:.1%} of the bound; {better} is at {least:.1%}",
                )
            order = (level, walk.judged[some[0]].ratio, _plainness(some[0]))
            why = f"keeps the objectives with {level[0]:g} {unit}"
            chosen.append(Chosen(some[0], order, why, variants=len(some) - 1))
            walk.best = walk.best or f"{level[0]:g} {unit}"
    _least_apart(walk, chosen, top, key, unit)


def _least_apart(walk: ServingWalk, chosen: list[Chosen], top: int, key: Callable, unit: str) -> None:
    """Choose candidates of two halves as well, up to what the last of the best needs."""

    def limit() -> tuple:
        known = sorted(one.order[0] for one in chosen)
        return known[top - 1] if len(known) >= top else (inf,)

    for some in ApartSearch(walk, key, unit).families(limit):
        some.sort(key=lambda one: (one.level, one.ratio, _plainness(one.candidate)))
        best = some[0]
        for other in some[1:]:
            walk.lose(other.candidate, ROOM, f"keeps the objectives with {other.level[0]:g} {unit} and less room")
        why = f"keeps the objectives with {best.level[0]:g} {unit}"
        order = (best.level, best.ratio, _plainness(best.candidate))
        chosen.append(Chosen(best.candidate, order, why, variants=sum(o.level == best.level for o in some[1:])))
        least = min(one.order[0] for one in chosen)
        walk.best = f"{least[0]:g} {unit}"


def most_goodput(walk: ServingWalk, chosen: list[Chosen], top: int) -> None:
    """Choose the candidates that keep the objectives at the greatest rate, on as many replicas as there is room for."""
    families: dict[tuple, list[tuple[float, Line]]] = defaultdict(list)
    for line in _roomy(walk):
        most = walk.of(line).bounds(line.phase, line.engine).most_speed(line.counts[-1])
        families[line.at(1).family].append((most, line))
    base = rate_of(walk.evaluators[0].requests)
    for some in sorted(families.values(), key=lambda some: -max(speed for speed, _ in some)):
        best, winner, others = 0.0, None, []
        known = sorted((one.speed for one in chosen), reverse=True)
        least = known[top - 1] if len(known) >= top else 0.0
        for speed, line in sorted(some, key=lambda one: (-one[0], _plainness(one[1].at(1)))):
            walk.look()
            candidate = line.at(line.counts[-1])
            if speed <= max(best, least):
                walk.lose(candidate, MORE_RATE, f"at most {speed * base:.3g} requests/s can be done in time (bound)")
                continue
            found = walk.of(line).most_rate(candidate, max(best, least))
            if found > 0:
                others += [] if winner is None else [winner]
                best, winner = found, candidate
            else:
                others.append(candidate)
        for other in others:
            walk.lose(other, MORE_RATE, f"does not keep the objectives at {max(best, least) * base:.3g} requests/s")
        if winner is not None:
            rate = best * base
            walk.judged[winner] = walk.of(winner).judged(winner, best, whole=True)
            chosen.append(Chosen(winner, (-rate, _plainness(winner)), f"keeps them at {rate:.3g} requests/s", best))
            walk.best = f"{max(one.speed for one in chosen) * base:.3g} requests/s"


MORE_RATE = "another plan keeps the objectives at a greater rate"


def _roomy(walk: ServingWalk) -> list[Line]:
    """The lines with room for their weights and requests whose least latencies keep the objectives, on as many replicas
    as there is room for."""
    found = []
    for line in walk.lines:
        for count in line.counts[:-1]:
            walk.lose(line.at(count), FEWER, f"{line.counts[-1]} replicas have room")
        if not walk.excluded(line, line.counts[-1]) or walk.lost[line.at(line.counts[-1])][0] == WORK:
            found.append(line)
    return found


def _whole(value: Callable[[object], float], said: Callable[[float], str]) -> Rule:
    """A rule that simulates every layout and engine on as many replicas as there is room for."""

    def rule(walk: ServingWalk, chosen: list[Chosen], top: int) -> None:
        best: dict[tuple, Chosen] = {}
        for line in _roomy(walk):
            candidate = line.at(line.counts[-1])
            walk.look()
            judged = walk.judged[candidate] = walk.of(candidate).judged(candidate, whole=True)
            order = (value(judged.metrics), _plainness(candidate))
            one = Chosen(candidate, order, said(order[0]))
            before = best.get(candidate.family)
            if before is None or one.order < before.order:
                best[candidate.family], one = one, before
                chosen[:] = best.values()
            if one is not None:
                walk.lose(one.candidate, "another engine is better with the same layout", one.why)

    return rule


#: Objectives for which prefill and decode may be apart: those of the least that keeps the bounds.
LEAST = ("devices", "cost")
#: Objective -> its rule.
RULES: dict[str, Rule] = {
    "devices": fewest,
    "cost": cheapest,
    "goodput": most_goodput,
    "throughput": _whole(lambda m: -m.throughput_tokens_per_s, lambda v: f"{-v:,.0f} tokens/s"),
    "e2e": _whole(lambda m: m.e2e_s.mean, lambda v: f"{latency(v)} from arrival to the last token on average"),
}
