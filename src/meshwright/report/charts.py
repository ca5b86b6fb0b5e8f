"""The HTML report's charts as positions: percentages of a track for bars, rows for the tables that say the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.answer.prediction import Prediction
from meshwright.causes import BY_NAME
from meshwright.graph import QUEUES
from meshwright.quantity import gibibytes, seconds
from meshwright.report import facts
from meshwright.report.palette import STACK, cause_colour
from meshwright.report.sheet import Sheet
from meshwright.timeline import Timeline

#: Rank classes listed in a chart before the rest is summed up in its table only.
MOST_RANKS = 64


def waterfall(prediction: Prediction) -> dict[str, Any]:
    """Rows of the waterfall and the roofline bound, on one scale."""
    bars = facts.waterfall(prediction)
    whole = max(prediction.step_time_s, prediction.bound_s, sum(b.seconds for b in bars)) or 1.0
    rows = [
        {
            "name": b.name,
            "what": b.what,
            "time": seconds(b.seconds),
            "share": f"{b.share:.1%}",
            "left": 100 * b.start_s / whole,
            "width": 100 * b.seconds / whole,
            "colour": cause_colour(b.name),
            "idle": BY_NAME[b.name].kind == "wait" if b.name in BY_NAME else False,
        }
        for b in bars
    ]
    return {
        "rows": [row for row in rows if row["width"]],
        "absent": [row["what"] for row in rows if not row["width"]],
        "bound": seconds(prediction.bound_s),
        "bound_at": 100 * prediction.bound_s / whole,
        "bound_share": f"{prediction.bound_s / prediction.step_time_s:.0%}" if prediction.step_time_s else "",
        "step": seconds(prediction.step_time_s),
        "step_at": 100 * prediction.step_time_s / whole,
    }


def memory(prediction: Prediction | Sheet) -> dict[str, Any]:
    """Stacked bars of what is alive at each rank class's peak, against the capacity."""
    order = memory_categories(prediction)
    colours = {name: STACK[i % len(STACK)] for i, name in enumerate(order)}
    scale = max((max(m.peak_bytes, m.capacity_bytes) for m in prediction.memory), default=1.0) or 1.0
    shown = sorted(prediction.memory, key=lambda m: m.headroom_bytes)[:MOST_RANKS]
    kept = [m for m in prediction.memory if m in shown]
    bars = [
        {
            "rank": m.rank,
            "multiplicity": m.multiplicity,
            "peak": gibibytes(m.peak_bytes),
            "capacity": gibibytes(m.capacity_bytes),
            "capacity_at": 100 * m.capacity_bytes / scale,
            "room": gibibytes(abs(m.headroom_bytes)),
            "over": m.headroom_bytes < 0,
            "at": seconds(m.at_s),
            "tightest": m == prediction.tightest,
            "parts": [
                {
                    "name": name,
                    "size": gibibytes(m.alive.get(name, 0.0)),
                    "width": 100 * m.alive.get(name, 0.0) / scale,
                    "colour": colours[name],
                }
                for name in order
            ],
        }
        for m in kept
    ]
    return {"categories": [(name, colours[name]) for name in order], "bars": bars, "total": len(prediction.memory)}


def memory_categories(prediction: Prediction | Sheet) -> list[str]:
    """Every category that is alive somewhere, in the order in which ranks name them."""
    found = dict.fromkeys(name for m in prediction.memory for name, held in m.alive.items() if held)
    timeline = prediction.timeline
    traced = (c for trace in (timeline.memory if timeline is not None else ()) for c in trace.categories)
    return list(found | dict.fromkeys(traced))


def sensitivities(prediction: Prediction) -> list[dict[str, Any]]:
    rows = facts.ranked(prediction)
    scale = max((abs(change) for *_, change in rows), default=1.0) or 1.0
    return [
        {"what": what, "change": facts.percent(change), "width": 100 * abs(change) / scale, "better": change < 0}
        for _, what, change in rows
    ]


def ranks(timeline: Timeline) -> list[dict[str, Any]]:
    """One row per rank class: the timeline as a table."""
    rows = []
    for rank, known in enumerate(timeline.ranks):
        compute = timeline.of_rank(rank)
        last = float(timeline.end_s[compute].max(initial=0.0))
        first = float(timeline.start_s[compute].min(initial=last))
        exposed = sum(timeline.exposed_comm(rank).values())
        busy = timeline.busy_s(rank)
        rows.append(
            {
                "rank": known.name,
                "multiplicity": known.multiplicity,
                "tasks": f"{int((timeline.rank == rank).sum()):,}",
                "first": seconds(first),
                "last": seconds(last),
                "busy": seconds(busy),
                "idle": seconds(max(last - first - busy, 0.0)),
                "exposed": seconds(exposed),
            }
        )
    return rows


def waits(timeline: Timeline, count: int = 12) -> list[dict[str, Any]]:
    """The longest times a compute queue stood idle, with what it waited for."""
    found: list[tuple[float, int]] = []
    least = 1e-9 * timeline.makespan_s
    for rank in range(len(timeline.ranks)):
        spans = timeline.of_rank(rank, QUEUES[0])
        before = np.concatenate([[0.0], timeline.end_s[spans][:-1]])
        gaps = timeline.start_s[spans] - before
        found += [(float(g), int(s)) for g, s in zip(gaps, spans) if g > least]
    found.sort(reverse=True)
    chosen = np.array([span for _, span in found[:count]], np.int64)
    names = timeline.names(chosen)
    causes = timeline.waited_for[chosen] if len(chosen) else np.empty(0, np.int64)
    return [
        {
            "gap": seconds(gap),
            "task": name,
            "rank": timeline.ranks[timeline.rank[span]].name,
            "start": seconds(float(timeline.start_s[span])),
            "cause": _cause(timeline, int(cause)),
        }
        for (gap, span), name, cause in zip(found[:count], names, causes)
    ]


def _cause(timeline: Timeline, span: int) -> str:
    if span < 0:
        return "not recorded"
    return f"{timeline.names(np.array([span]))[0]} on {timeline.ranks[timeline.rank[span]].name}"
