"""The result of a search: the best plans with how sure it is of their order, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.answer.metrics import METRICS
from meshwright.answer.prediction import Prediction
from meshwright.causes import of_kind
from meshwright.plan import Plan
from meshwright.search.draws import PlanStanding, Sureness
from meshwright.search.recommend import Recommended
from meshwright.search.space import FACETS, Space
from meshwright.search.ties import Tie

FORMAT_VERSION = 1
#: The metric of an answer that each objective is.
METRIC_OF = {
    "step": "step_time_s",
    "cost": "usd_per_million_tokens",
    "energy": "joules_per_token",
    "headroom": "headroom_bytes",
}
OBJECTIVES = {name: METRICS[metric].words for name, metric in METRIC_OF.items()}
#: Objectives that are the step time times what every plan costs alike, since every plan uses every device: bounds on
#: the step time prove them. Nothing bounds how much memory a plan leaves.
PROVABLE = ("step", "cost", "energy")
#: A variant of a plan is counted beside it when it takes at most this share longer.
WITHIN = 0.01


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One of the best plans. ``tie`` says why it cannot be told from the fastest one, None when it can. ``delta`` is
    what it changes against the plan above it, in words. ``standing`` is how it stands among those shown under shared
    draws of what is unknown. ``also`` are words that another spelling of it has instead of
    its own: the same work at the same times in the same memory. ``family`` are the words it has in common with its
    ``variants``: the others of its family that were evaluated and take at most :data:`WITHIN` longer."""

    plan: Plan
    prediction: Prediction
    tie: Tie | None
    delta: str
    standing: PlanStanding
    also: tuple[str, ...] = ()
    family: str = ""
    variants: tuple[Variant, ...] = ()


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of a family besides its best one."""

    plan: Plan
    step_time_s: float
    headroom_bytes: float


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest plan that a demand excludes: what it ``wins`` over the best that keeps the demand, as a share of its
    step time (None where nothing keeps it), and the ``reasons``."""

    plan: Plan
    step_time_s: float
    headroom_bytes: float
    wins: float | None
    reasons: tuple[str, ...]


class NearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that does not fit, by how much, and what would make it fit."""

    plan: Plan
    step_time_s: float
    lacks_bytes: float
    remedy: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a search: ``question`` is the model, the cluster and the workload.

    ``covered`` plans are in the space; each was ``evaluated``, or ``pruned`` for the reason it is counted under.
    ``bounded`` of them had a bound of their own. ``best`` are in order, the fastest first; with ``families`` each is
    the best of its family. ``proven_optimal``: every plan not evaluated has a bound above the first of them, under the
    cost model. ``stopped``: somebody ended the search before it was done. ``recalled``: the store had the proof.
    ``framework`` is whose costs they are; ``engines`` and ``room_bytes`` what was demanded of every plan, with
    ``remarks`` on that. ``pareto`` are (plan, values) along two objectives, of the plans that were evaluated and fit;
    ``points`` are all of those. ``sure``: how sure the order of the best is, None where there is one plan.
    ``usual``: the room is that of the usual risk, which nobody asked for. ``unrunnable`` is the fastest plan that the
    engines do not run, ``risky`` the fastest that leaves less than the usual room.
    """

    question: tuple[str, str, str]
    space: Space
    best: tuple[Ranked, ...]
    misses: tuple[NearMiss, ...]
    covered: int
    evaluated: int
    bounded: int
    pruned: dict[str, int]
    proven_optimal: bool
    stopped: bool = False
    recalled: bool = False
    seconds: float
    strategy: str
    families: bool = False
    framework: str = ""
    engines: tuple[str, ...] = ()
    room_bytes: float = 0.0
    usual: bool = False
    remarks: tuple[str, ...] = ()
    sure: Sureness | None = None
    recommended: Recommended | None = None
    unrunnable: Excluded | None = None
    risky: Excluded | None = None
    objective: str
    objectives: tuple[str, str]
    pareto: tuple[tuple[Plan, tuple[float, float]], ...]
    points: tuple[tuple[Plan, tuple[float, float]], ...] = ()

    @property
    def fits(self) -> bool:
        return bool(self.best)

    def _recommended(self) -> dict[str, Any] | None:
        pick = self.recommended
        if pick is None:
            return None
        return {
            "plan": pick.plan.text(),
            "step_time_s": pick.prediction.step_time_s,
            "headroom_bytes": pick.prediction.tightest.headroom_bytes,
            "slower": pick.slower,
            "why": pick.why,
            "engines": list(pick.engines),
            "room_bytes": pick.room_bytes,
            "regret_worst": pick.regret_worst,
        }

    def _excluded(self, found: Excluded | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "plan": found.plan.text(),
            "step_time_s": found.step_time_s,
            "headroom_bytes": found.headroom_bytes,
            "wins": found.wins,
            "reasons": list(found.reasons),
        }

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values; each of ``best`` is a prediction's JSON with its place among the others."""
        return {
            "format_version": FORMAT_VERSION,
            "model": self.question[0],
            "cluster": self.question[1],
            "workload": self.question[2],
            "best": [
                {
                    **r.prediction.to_json(),
                    "headroom_bytes": r.prediction.tightest.headroom_bytes,
                    "tie": None if r.tie is None else r.tie._asdict(),
                    "standing": msgspec.structs.asdict(r.standing),
                    "delta": r.delta,
                    "also": list(r.also),
                    "family": r.family,
                    "variants": [_variant(v) for v in r.variants],
                }
                for r in self.best
            ],
            "sure": None if self.sure is None else msgspec.to_builtins(self.sure),
            "recommended": self._recommended(),
            "unrunnable": self._excluded(self.unrunnable),
            "risky": self._excluded(self.risky),
            "families": self.families,
            "framework": self.framework,
            "engines": list(self.engines),
            "room_bytes": self.room_bytes,
            "remarks": list(self.remarks),
            "misses": [
                {"plan": m.plan.text(), "step_time_s": m.step_time_s, "lacks_bytes": m.lacks_bytes, "remedy": m.remedy}
                for m in self.misses
            ],
            "evaluated": self.evaluated,
            "bounded": self.bounded,
            "covered": self.covered,
            "pruned": self.pruned,
            "proven_optimal": self.proven_optimal,
            "stopped": self.stopped,
            "recalled": self.recalled,
            "seconds": self.seconds,
            "strategy": self.strategy,
            "objective": self.objective,
            "pareto": {
                "objectives": list(self.objectives),
                "plans": [{"plan": plan.text(), "values": list(values)} for plan, values in self.pareto],
            },
            "space": {f: None if self.space[f] is None else [_plain(v) for v in self.space[f]] for f in FACETS},
        }


def value_of(objective: str, prediction: Prediction) -> float | None:
    """One objective of an answer, less being better; None where the catalog does not know."""
    metric = prediction.metrics[METRIC_OF[objective]]
    if metric is None:
        return None
    return -metric.value if METRICS[METRIC_OF[objective]].better == "more" else metric.value


def _variant(v: Variant) -> dict[str, Any]:
    return {"plan": v.plan.text(), "step_time_s": v.step_time_s, "headroom_bytes": v.headroom_bytes}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def delta(before: Prediction, after: Prediction) -> str:
    """Return the difference of a plan to another in a line of text: words, share of communication, and memory."""
    a, b = before.plan.text().split(), after.plan.text().split()
    gone, new = [w for w in a if w not in b], [w for w in b if w not in a]
    parts = [f"{' '.join(gone) or 'nothing'} -> {' '.join(new) or 'nothing'}"]
    spent = [sum(p.attribution[c] for c in of_kind("exchange")) / p.step_time_s for p in (before, after)]
    change = 100 * (spent[1] - spent[0])
    if abs(change) >= 0.05:
        parts.append(f"{'costs' if change > 0 else 'saves'} {abs(change):.1f}% communication")
    room = (after.tightest.headroom_bytes - before.tightest.headroom_bytes) / 2**30
    if abs(room) >= 0.05:
        parts.append(f"{'saves' if room > 0 else 'costs'} {abs(room):.1f} GiB")
    return ", ".join(parts)


def pareto(points: Iterable[tuple[Plan, tuple[float, float]]]) -> tuple[tuple[Plan, tuple[float, float]], ...]:
    """The points no other is better than in one objective and as good in the other; smaller is better in both."""
    front: list[tuple[Plan, tuple[float, float]]] = []
    for plan, values in sorted(points, key=lambda p: (p[1], len(p[0].text()), p[0].text())):
        if not front or values[1] < front[-1][1][1]:
            front.append((plan, values))
    return tuple(front)
