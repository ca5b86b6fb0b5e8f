"""The Pareto front of a search as a drawing: evaluated plans along two objectives, both axes with ticks and units."""

from __future__ import annotations

from math import ceil, floor, log10

import msgspec

from meshwright.plan import Plan
from meshwright.report.figure import Drawing
from meshwright.report.search_text import shown
from meshwright.search.found import OBJECTIVES, Found

LEFT, RIGHT, TOP, BOTTOM = 78.0, 22.0, 40.0, 46.0
#: Evaluated plans that are drawn besides the front, the fastest first.
DRAWN = 400
#: What an objective is called on an axis, and whether more of it is better there.
AXES = {
    "step": ("step time, seconds", False),
    "cost": ("US dollars per million tokens", False),
    "energy": ("joules per token", False),
    "headroom": ("memory left, GiB", True),
}


class PlanMark(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on the plot: where, in units of the figure; what it is, in words; and whether it is ``named``: the
    fastest or the recommended one, a plan of the ``front``, or one of the others ("")."""

    x: float
    y: float
    plan: Plan
    text: str
    named: str


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One objective from `low` to `high` in the unit of its axis, at round values."""

    objective: str
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, objective: str, values: list[float]) -> Axis:
        """An axis with round ends around values as they are drawn."""
        low, high = min(values), max(values)
        spread = (high - low) or abs(high) or 1.0
        low, high = low - 0.04 * spread, high + 0.04 * spread
        step = _round_step((high - low) / 5)
        first, last = ceil(low / step), floor(high / step)
        return cls(objective=objective, low=low, high=high, ticks=tuple(k * step for k in range(first, last + 1)))

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    @property
    def title(self) -> str:
        return AXES[self.objective][0]


def drawn(objective: str, value: float) -> float:
    """A value of an objective in the unit of its axis: memory left in GiB, upwards."""
    return -value / 2**30 if objective == "headroom" else value


def _round_step(least: float) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that is no less than `least`."""
    power = 10.0 ** floor(log10(least))
    return next(k * power for k in (1.0, 2.0, 2.5, 5.0, 10.0) if k * power >= least * (1 - 1e-9))


def marks(found: Found, width: float, height: float) -> tuple[list[PlanMark], tuple[Axis, Axis]]:
    """The plans on a plot of this size, the front last, and its axes."""
    front = dict(found.pareto)
    named = {found.best[0].plan: "fastest"} if found.best else {}
    if found.recommended is not None:
        named[found.recommended.plan] = "recommended" if found.recommended.plan not in named else "fastest, recommended"
    others = [p for p in sorted(found.points, key=lambda p: p[1]) if p[0] not in front and p[0] not in named]
    rest = dict(others[:DRAWN]) | {p: v for p, v in found.points if p in named} | front
    across, up = (
        Axis.of(o, [drawn(o, values[axis]) for values in rest.values()]) for axis, o in enumerate(found.objectives)
    )
    out = []
    for plan, values in rest.items():
        x, y = (drawn(o, v) for o, v in zip(found.objectives, values))
        words = ", ".join(shown(o, v) for o, v in zip(found.objectives, values))
        out.append(
            PlanMark(
                x=LEFT + across.share(x) * (width - LEFT - RIGHT),
                y=height - BOTTOM - up.share(y) * (height - TOP - BOTTOM),
                plan=plan,
                text=words,
                named=named.get(plan, "front" if plan in front else ""),
            )
        )
    return out, (across, up)


def figure(found: Found, width: float = 720.0, height: float = 400.0) -> Drawing:
    """The plot of a search that found plans."""
    placed, (across, up) = marks(found, width, height)
    first, second = (OBJECTIVES[o] for o in found.objectives)
    whole = Drawing(width, height, f"Evaluated plans by {first} and {second}; the table says the same of the front")
    _axes(whole, across, up, width, height)
    front = sorted((m for m in placed if m.named), key=lambda m: m.x)
    whole.line([(m.x, m.y) for m in front if m.plan in dict(found.pareto)], "blue", width=1.5, opacity=0.6)
    for mark in placed:
        colour, radius = ("blue", 4.5) if mark.named else ("grey", 2.5)
        if "fastest" in mark.named or "recommended" in mark.named:
            colour, radius = ("green", 6.5) if "recommended" in mark.named else ("orange", 6.5)
        whole.dot(mark.x, mark.y, colour, radius=radius, title=f"{mark.plan.text()}: {mark.text}")
    for mark in placed:
        if "fastest" in mark.named or "recommended" in mark.named:
            right = mark.x > width * 0.6
            anchor, shift = ("end", -11) if right else ("start", 11)
            below = mark.named == "fastest"
            whole.text(mark.x + shift, mark.y + (4 if below else -8), mark.named, anchor=anchor)
    return whole


def _axes(whole: Drawing, across: Axis, up: Axis, width: float, height: float) -> None:
    bottom, right = height - BOTTOM, width - RIGHT
    for value in up.ticks:
        y = bottom - up.share(value) * (height - TOP - BOTTOM)
        whole.line([(LEFT, y), (right, y)], "line")
        whole.text(LEFT - 8, y + 4, f"{value:.4g}", role="muted", anchor="end")
    for value in across.ticks:
        x = LEFT + across.share(value) * (right - LEFT)
        whole.line([(x, bottom), (x, bottom + 5)], "muted")
        whole.text(x, bottom + 19, f"{value:.4g}", role="muted", anchor="middle")
    whole.line([(LEFT, bottom), (right, bottom)], "muted")
    whole.text((LEFT + right) / 2, height - 8, across.title, role="muted", anchor="middle")
    whole.text(8, 18, up.title, role="muted")
    better = f"better: left and {'up' if AXES[up.objective][1] else 'down'}"
    if AXES[across.objective][1]:
        better = better.replace("left", "right")
    whole.text(right, 18, better, role="muted", anchor="end")
