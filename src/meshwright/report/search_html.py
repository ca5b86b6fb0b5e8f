"""The answer of a search as one offline HTML file: the plan to take, families, the Pareto front, why others lost.

Everything reads without script. Points of the front are links over the drawing, so that a pointer, a finger and the
Tab key all show what they are and lead to their row of the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.atomic import write_bytes
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report import document, facts, palette
from meshwright.report.search_plot import figure, marks
from meshwright.report.search_text import between, coverage, demanded, difference, excluded, shown, verdict, words
from meshwright.search.found import FORMAT_VERSION, OBJECTIVES, WITHIN, Found, Ranked
from meshwright.search.space import FACETS

STYLES = ("base.css", "search.css")
#: Sizes of the plot on wide and narrow pages, in its own units.
SIZES = {"broad": (880.0, 400.0), "narrow": (360.0, 340.0)}


def write(found: Found, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(found).encode("utf-8"))


def render(found: Found) -> str:
    """The report as one HTML document."""
    most = max(found.pruned.values(), default=1)
    first = found.best[0].prediction if found.best else None
    return document.render(
        "search.html.j2",
        found=found,
        format_version=FORMAT_VERSION,
        model=found.question[0],
        cluster=found.question[1],
        workload=found.question[2],
        verdict=verdict(found),
        coverage=coverage(found),
        remarks=[r for r in (demanded(found), *found.remarks) if r],
        light=palette.css("light"),
        dark=palette.css("dark"),
        styles=[document.static(name) for name in STYLES],
        scripts=[document.static("theme.js")],
        pick=_pick(found),
        rows=[_row(i, r, found) for i, r in enumerate(found.best)],
        within=f"{WITHIN:.0%}",
        beyond=[
            {
                "plan": one.plan.text(),
                "title": title,
                "step": seconds(one.step_time_s),
                "room": gibibytes(one.headroom_bytes),
                "reasons": one.reasons,
            }
            for title, one in excluded(found)
        ],
        plots=[_plot(found, name) for name in SIZES] if found.pareto else [],
        front=[(plan.text(), [shown(o, x) for o, x in zip(found.objectives, v)]) for plan, v in found.pareto],
        objectives=[OBJECTIVES[o] for o in found.objectives],
        training_run=facts.training_run(first) if first else [],
        misses=[(m.plan.text(), gibibytes(m.lacks_bytes), seconds(m.step_time_s), m.remedy) for m in found.misses],
        pruned=[
            {"why": why, "count": f"{n:,}", "width": max(100 * n / most, 0.3)}
            for why, n in sorted(found.pruned.items(), key=lambda item: -item[1])
        ],
        space=[(facet, what, _values(found.space[facet])) for facet, what in FACETS.items()],
    )


def _pick(found: Found) -> dict[str, Any] | None:
    """The recommended plan, with what a reader compares first."""
    pick = found.recommended
    if pick is None:
        return None
    p = pick.prediction
    low, high = p.step_time_interval_s
    usd = p.money.usd_per_million_tokens
    return {
        "plan": pick.plan.text(),
        "why": pick.why,
        "step": seconds(p.step_time_s),
        "interval": between(low, high),
        "track": _track(low, p.step_time_s, high, low * 0.9, high * 1.05),
        "tiles": [
            ("Throughput", f"{p.tokens_per_s_per_gpu:,.0f}", f"{p.train.counted}/s/GPU"),
            ("MFU", f"{p.mfu:.1%}", f"bubble {p.bubble:.1%}"),
            ("Memory left", gibibytes(p.tightest.headroom_bytes), f"of {gibibytes(p.tightest.capacity_bytes)}"),
            (
                f"Per million {p.train.counted}",
                "-" if usd is None else f"${usd:.3g}",
                "no price known" if usd is None else "USD",
            ),
            ("Run by", big(len(pick.engines)), ", ".join(pick.engines) or "no engine"),
        ],
    }


def _row(place: int, ranked: Ranked, found: Found) -> dict[str, Any]:
    """A family: its best plan, where its interval lies among the others, and its variants."""
    p = ranked.prediction
    ends = [r.prediction.step_time_interval_s for r in found.best]
    usd = p.money.usd_per_million_tokens
    tie = ranked.tie
    return {
        "place": place + 1,
        "plan": words(ranked),
        "step": seconds(p.step_time_s),
        "slower": f"+{p.step_time_s / found.best[0].prediction.step_time_s - 1:.1%}" if place else "",
        "interval": between(*p.step_time_interval_s),
        "track": _track(
            p.step_time_interval_s[0],
            p.step_time_s,
            p.step_time_interval_s[1],
            min(low for low, _ in ends),
            max(high for _, high in ends),
        ),
        "mfu": f"{p.mfu:.1%}",
        "room": gibibytes(p.tightest.headroom_bytes),
        "filled": 100 * min(1.0, max(0.0, p.tightest.peak_bytes / p.tightest.capacity_bytes)),
        "cost": "-" if usd is None else f"${usd:.3g}",
        "delta": ranked.delta,
        "tie": tie and f"tie with 1: {difference(tie.low_s, tie.high_s)}; to decide, measure {tie.measure}",
        "recommended": found.recommended is not None and found.recommended.plan == ranked.plan,
        "variants": [(v.plan.text(), seconds(v.step_time_s), gibibytes(v.headroom_bytes)) for v in ranked.variants],
    }


def _track(low: float, at: float, high: float, first: float, last: float) -> dict[str, float]:
    """Where an interval and its value lie between `first` and `last`, in percent."""
    whole = (last - first) or 1.0
    return {
        "left": 100 * (low - first) / whole,
        "width": 100 * (high - low) / whole,
        "at": 100 * (at - first) / whole,
    }


def _plot(found: Found, name: str) -> dict[str, Any]:
    """The drawing at one size, and the points of it that can be pointed at, in percent."""
    width, height = SIZES[name]
    placed, _ = marks(found, width, height)
    rows = {plan: i for i, (plan, _) in enumerate(found.pareto)}
    return {
        "name": name,
        "svg": figure(found, width, height).svg(),
        "points": [
            {
                "left": 100 * m.x / width,
                "top": 100 * m.y / height,
                "plan": m.plan.text(),
                "text": m.text,
                "named": m.named if m.named != "front" else "",
                "row": rows.get(m.plan),
                "side": "before" if m.x > width / 2 else "after",
            }
            for m in sorted(placed, key=lambda m: m.x)
            if m.named
        ],
    }


def _values(values: tuple[Any, ...] | None) -> str:
    """The values of a facet as they are said."""
    if values is None:
        return "worked out from the others"
    return ", ".join(_said(v) for v in values)


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
