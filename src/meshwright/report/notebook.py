"""A prediction in a notebook: its verdict and three pictures (where the step goes, memory, compute queues) as one piece
of HTML with inline SVG, without script or style sheet, in the ink of the page it stands in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.answer.prediction import Prediction
from meshwright.graph import KINDS
from meshwright.quantity import gibibytes, seconds
from meshwright.report import charts, document, facts
from meshwright.report.palette import KINDS as KIND_COLOURS
from meshwright.report.palette import MARKS, STACK
from meshwright.timeline import Timeline

#: The pictures' width and the room for labels at their left, in the SVG's own units.
WIDTH, LABELS = 640.0, 96.0
#: Rank classes drawn, the columns that a lane is cut into, and the height of a full one.
LANES, COLUMNS, LANE_HEIGHT = 8, 320, 12
#: Marks that read on light and dark ground alike (3:1 on both) are those of the light theme.
MARK = MARKS["light"]


def fragment(prediction: Prediction) -> str:
    """The prediction as a piece of HTML."""
    return document.render(
        "notebook.html.j2",
        p=prediction,
        verdict=facts.verdict(prediction),
        step=seconds(prediction.step_time_s),
        good=MARK["green"],
        bad=MARK["red"],
        width=WIDTH,
        labels=LABELS,
        waterfall=_waterfall(prediction),
        memory=_memory(prediction),
        timeline=_timeline(prediction.timeline),
    )


def _waterfall(prediction: Prediction) -> dict[str, Any]:
    """Bars one after the other, each with its time behind it, or before it where there is no room behind."""
    room, rows = WIDTH - LABELS, []
    for i, bar in enumerate(charts.waterfall(prediction)["rows"]):
        x, width = LABELS + room * bar["left"] / 100, max(room * bar["width"] / 100, 1.0)
        before = x + width > WIDTH - 110
        rows.append(
            {key: bar[key] for key in ("name", "what", "time", "share")}
            | {"x": round(x, 1), "width": round(width, 1), "y": 18 * i, "colour": MARK[bar["colour"]]}
            | {"before": before, "after": round(x - 4 if before else x + width + 4, 1)}
        )
    return {"rows": rows, "height": 18 * len(rows)}


def _memory(prediction: Prediction) -> dict[str, Any]:
    """Lay out the memory alive at the peak of the fullest rank, against its capacity, with a legend."""
    tight = prediction.tightest
    scale = max(tight.peak_bytes, tight.capacity_bytes) or 1.0
    room, x, parts = WIDTH - LABELS, LABELS, []
    held = sorted(((size, name) for name, size in tight.alive.items() if size > 0), reverse=True)
    for i, (size, name) in enumerate(held):
        width = room * size / scale
        parts.append(
            {
                "name": name,
                "size": gibibytes(size),
                "x": round(x, 1),
                "width": round(width, 1),
                "colour": MARK[STACK[i % len(STACK)]],
                "legend_x": LABELS + (i % 2) * room / 2,
                "legend_y": 26 + 16 * (i // 2),
            }
        )
        x += width
    return {
        "rank": tight.rank,
        "peak": gibibytes(tight.peak_bytes),
        "capacity": gibibytes(tight.capacity_bytes),
        "capacity_x": round(LABELS + room * tight.capacity_bytes / scale, 1),
        "parts": parts,
        "height": 28 + 16 * -(-len(parts) // 2),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """The compute queue of some rank classes, evenly chosen from first to last."""
    count = len(timeline.ranks)
    chosen = np.unique(np.linspace(0, count - 1, min(count, LANES)).round().astype(int)).tolist() if count else []
    lanes = [
        {"rank": timeline.ranks[rank].name, "y": 16 * i, "paths": _paths(timeline, rank, 16.0 * i)}
        for i, rank in enumerate(chosen)
    ]
    return {"lanes": lanes, "height": max(16 * len(lanes), 1)}


def _paths(timeline: Timeline, rank: int, y: float) -> list[dict[str, str]]:
    """One lane as a path for each kind of task: every column is filled from its foot as far as the kinds, one upon the
    other, keep the queue busy there, so that what stays empty is idle time."""
    spans, whole = timeline.of_rank(rank), timeline.makespan_s or 1.0
    foot, found = np.zeros(COLUMNS, np.int64), []
    busy = np.zeros(COLUMNS)
    for kind in range(len(KINDS)):
        mine = spans[timeline.kind[spans] == kind]
        if not len(mine):
            continue
        busy += _coverage(timeline.start_s[mine] / whole * COLUMNS, timeline.end_s[mine] / whole * COLUMNS)
        top = np.rint(np.clip(busy, 0.0, 1.0) * LANE_HEIGHT).astype(np.int64)
        colour = MARK[KIND_COLOURS.get(KINDS[kind], "grey")]
        found.append({"kind": KINDS[kind], "d": _bars(foot, top, y + 2 + LANE_HEIGHT), "colour": colour})
        foot = top
    return found


def _bars(foot: np.ndarray, top: np.ndarray, ground: float) -> str:
    """Bars from `foot` to `top` above the `ground` as one path; neighbours of one height are one bar."""
    edges = [0, *(np.flatnonzero(np.diff(foot) | np.diff(top)) + 1).tolist(), COLUMNS]
    scale, out = (WIDTH - LABELS) / COLUMNS, []
    for a, b in pairwise(edges):
        if top[a] > foot[a]:
            wide, tall = (b - a) * scale, top[a] - foot[a]
            out.append(f"M{LABELS + a * scale:.1f} {ground - top[a]:.0f}h{wide:.1f}v{tall}h-{wide:.1f}z")
    return "".join(out)


def _coverage(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Share of each of the columns [i, i + 1) that disjoint intervals cover: [COLUMNS]."""
    edges = np.arange(COLUMNS + 1, dtype=float)
    if not len(start):
        return np.zeros(COLUMNS)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    before = np.concatenate([[0.0], np.cumsum(end - start)])
    which = np.searchsorted(start, edges, side="right") - 1
    partly = np.where(which >= 0, np.minimum(edges, end[which]) - start[which], 0.0)
    covered = np.where(which >= 0, before[np.maximum(which, 0)] + partly, 0.0)
    return np.diff(covered)
