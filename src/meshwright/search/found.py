"""What a search found: the best plans with how sure it is of their order, and why the others lost."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.plan import Plan
from meshwright.prediction import Prediction
from meshwright.search.space import FACETS, Space
from meshwright.search.ties import Tie

FORMAT_VERSION = 1
OBJECTIVES = {
    "step": "step time",
    "cost": "dollars per token",
    "energy": "joules per token",
    "headroom": "memory left on the fullest rank",
}
#: Objectives that are the step time times what every plan costs alike, since every plan uses every device: bounds on
#: the step time prove them. Nothing bounds how much memory a plan leaves.
PROVABLE = ("step", "cost", "energy")
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One of the best plans. ``tie`` says why it cannot be told from the fastest one, None when it can. ``delta`` is
    what it changes against the plan above it, in words. ``also`` are words that another spelling of it has instead of
    its own: the same work at the same times in the same memory."""

    plan: Plan
    prediction: Prediction
    tie: Tie | None
    delta: str
    also: tuple[str, ...] = ()


class NearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that does not fit, by how much, and what would make it fit."""

    plan: Plan
    step_time_s: float
    lacks_bytes: float
    remedy: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a search.

    ``covered`` plans are in the space; each was ``evaluated``, or ``pruned`` for the reason it is counted under.
    ``bounded`` of them had a bound of their own. ``best`` are in order, the fastest first. ``proven_optimal``: every
    plan not evaluated has a bound above the first of them, under the cost model. ``stopped``: somebody ended the search
    before it was done. ``pareto`` are (plan, values) along two objectives, among evaluated plans.
    """

    space: Space
    best: tuple[Ranked, ...]
    misses: tuple[NearMiss, ...]
    covered: int
    evaluated: int
    bounded: int
    pruned: dict[str, int]
    proven_optimal: bool
    stopped: bool = False
    seconds: float
    strategy: str
    objective: str
    objectives: tuple[str, str]
    pareto: tuple[tuple[Plan, tuple[float, float]], ...]

    @property
    def fits(self) -> bool:
        return bool(self.best)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values; each of ``best`` is a prediction's JSON with its place among the others."""
        return {
            "format_version": FORMAT_VERSION,
            "best": [
                {
                    **r.prediction.to_json(),
                    "headroom_bytes": r.prediction.tightest.headroom_bytes,
                    "tie": None if r.tie is None else r.tie._asdict(),
                    "delta": r.delta,
                    "also": list(r.also),
                }
                for r in self.best
            ],
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
            "seconds": self.seconds,
            "strategy": self.strategy,
            "objective": self.objective,
            "pareto": {
                "objectives": list(self.objectives),
                "plans": [{"plan": plan.text(), "values": list(values)} for plan, values in self.pareto],
            },
            "space": {f: None if self.space[f] is None else [_plain(v) for v in self.space[f]] for f in FACETS},
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def delta(before: Prediction, after: Prediction) -> str:
    """What a plan changes against another: words, communication and memory."""
    a, b = before.plan.text().split(), after.plan.text().split()
    gone, new = [w for w in a if w not in b], [w for w in b if w not in a]
    parts = [f"{' '.join(gone) or 'nothing'} -> {' '.join(new) or 'nothing'}"]
    spent = [sum(p.attribution[c] for c in COMMUNICATION) / p.step_time_s for p in (before, after)]
    change = 100 * (spent[1] - spent[0])
    if abs(change) >= 0.05:
        parts.append(f"{'costs' if change > 0 else 'saves'} {abs(change):.1f}% communication")
    room = (after.tightest.headroom_bytes - before.tightest.headroom_bytes) / 2**30
    if abs(room) >= 0.05:
        parts.append(f"{'saves' if room > 0 else 'costs'} {abs(room):.1f} GiB")
    return ", ".join(parts)


def pareto(points: list[tuple[Plan, tuple[float, float]]]) -> tuple[tuple[Plan, tuple[float, float]], ...]:
    """The points no other is better than in one objective and as good in the other; smaller is better in both."""
    front: list[tuple[Plan, tuple[float, float]]] = []
    for plan, values in sorted(points, key=lambda p: (p[1], len(p[0].text()), p[0].text())):
        if not front or values[1] < front[-1][1][1]:
            front.append((plan, values))
    return tuple(front)
