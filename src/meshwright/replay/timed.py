"""Rebuilt tasks, timed: as they were, or under other durations."""

from __future__ import annotations

from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.compare.measured import Step, steps
from meshwright.errors import MeshwrightError
from meshwright.graph import QUEUE, TaskGraph
from meshwright.plan import Plan, parse
from meshwright.replay.graph import graph_of
from meshwright.replay.rebuild import rebuild
from meshwright.replay.tasks import EPSILON_S, Rebuilt
from meshwright.simulate.engine import times
from meshwright.timeline import Timeline, from_times


def plan_of(timeline: Timeline) -> Plan | None:
    """The plan a timeline says it is of."""
    said = timeline.identity.plan
    try:
        return parse(said) if said else None
    except MeshwrightError:
        return None


def typical(timeline: Timeline) -> Rebuilt:
    """The step of median length, each of its tasks, and the host time before it, as long as on the mean of the middle
    half of the steps: a step that something disturbed says little."""
    plan = plan_of(timeline)
    found = sorted(steps(timeline), key=lambda s: s.seconds)
    rebuilt = [rebuild(s.timeline, plan, s.seconds - _last_end(s)) for s in _middle_half(found)]
    beyond = any(s.timeline.makespan_s > s.seconds + EPSILON_S for s in found)
    chosen = msgspec.structs.replace(rebuilt[(len(rebuilt) - 1) // 2], beyond=beyond)
    if len(rebuilt) == 1:
        return chosen
    known: dict[tuple, list[tuple[float, float]]] = {}
    for one in rebuilt:
        for key, seconds, wait in zip(_keys(one), one.seconds.tolist(), one.wait_s.tolist()):
            known.setdefault(key, []).append((seconds, wait))
    both = np.array([[fmean(column) for column in zip(*known[key])] for key in _keys(chosen)])
    tail = fmean(one.tail_s for one in rebuilt)
    return msgspec.structs.replace(chosen, seconds=both[:, 0], wait_s=both[:, 1], tail_s=tail)


def _middle_half(ordered: list[Step]) -> list[Step]:
    """Without the quarter of the steps at either end."""
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def _last_end(step: Step) -> float:
    """Return the end of the last task that the step waited for: work after it belongs to the next step."""
    ends = step.timeline.end_s
    return float(ends[ends <= step.seconds + EPSILON_S].max(initial=0.0))


def _keys(rebuilt: Rebuilt) -> list[tuple]:
    """The stable key of every task."""
    seen: dict[tuple, int] = {}
    out = []
    for t in rebuilt.tasks:
        key = (t.ranks, t.kind, t.queue, t.stage, t.chunk, t.microbatch, t.layer)
        seen[key] = seen.get(key, -1) + 1
        out.append((*key, seen[key]))
    return out


def timed(rebuilt: Rebuilt, seconds: NDArray[np.float64] | None = None) -> Timeline:
    """The timeline of the tasks when each takes `seconds` [tasks] (default: as long as it took)."""
    own = rebuilt.seconds if seconds is None else seconds
    graph, number = graph_of(rebuilt)
    return timeline_of(graph, number, own, rebuilt.wait_s, rebuilt.timeline, [t.key for t in rebuilt.tasks])


def step_seconds(rebuilt: Rebuilt, timeline: Timeline) -> float:
    """Return the seconds of the step: the end of the last task in `timeline`, and the measured tail behind it."""
    ends = timeline.end_s
    if rebuilt.beyond:
        ends = ends[(timeline.queue != QUEUE["dp_gather"]) | (timeline.attribute("microbatch") >= 0)]
    return float(ends.max(initial=0.0)) + rebuilt.tail_s


def timeline_of(
    graph: TaskGraph,
    number: NDArray[np.int64],
    seconds: NDArray[np.float64],
    wait_s: NDArray[np.float64],
    original: Timeline,
    keys: list[str],
) -> Timeline:
    """The timeline of a graph whose tasks have `number` [N] in `seconds`, `wait_s` and `keys`; identity as the
    original's, as far as it still holds."""
    start, end = times(graph, seconds + wait_s)
    out = from_times(graph, start, end)
    names = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    spans = number[out.task]
    return msgspec.structs.replace(
        out,
        start_s=np.maximum(out.end_s - seconds[spans], out.start_s),
        cost_key=np.array([names[keys[i]] for i in spans], np.int32),
        keys=tuple(names),
        identity=msgspec.structs.replace(original.identity, graph=""),
    )
