"""Comparison of prediction and measurement of the same plan: step time, kinds of task, queues, critical paths.

Either side is a timeline of one step or of several. Times are per rank: the mean over the ranks that a class stands
for, of the median step. What is compared span for span has the same key on both sides:

* passes and sends: rank class, queue, kind, stage and microbatch, whatever number of layers a span covers;
* exchanges: rank class, queue, stage and layer, whether a reduction is counted as one all-reduce or in two halves;
  those of a stage together where one side exchanges them at once and the other layer by layer.

What only one side has is counted and shown, and is no part of an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, quantiles
from typing import Any

import msgspec
import numpy as np

from meshwright.answer.prediction import Prediction
from meshwright.compare.measured import Step, class_of, joined, middle, peak_bytes, repeats_s, steps
from meshwright.compare.pace import MachinePace, pace
from meshwright.graph import KIND, KINDS, QUEUES, RankClass
from meshwright.timeline import Identity, Timeline

FORMAT_VERSION = 1
#: Words of the identity that must agree for the two to be about the same thing.
SAME = ("model", "cluster", "workload", "plan")
#: What tasks of a queue are called together, where kinds differ between frameworks for the same work.
TOGETHER = {"dp": "gradient exchange", "dp_gather": "parameter gather", "outer": "outer exchange"}
NORM = "gradient norm"
#: What a prediction has in the optimizer's task beside the update, and a run outside of its spans.
AROUND = "around the update"
#: Times below this are a trace's rounding.
RESOLUTION_S = 1e-8
#: Share of a step from which on errors of opposite sign are said to hide one another.
CANCEL = 0.02
#: Steps of a spread: the middle 80%.
_TENTHS = 10


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity on both sides in seconds or another unit; ``error`` is predicted over measured, less one (None
    where nothing was measured)."""

    name: str
    predicted: float
    measured: float
    error: float | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one kind or queue: how many both sides have, how many only one has, and the seconds per rank of those
    that both have (``predicted_s``, ``measured_s``) and of the rest."""

    name: str
    matched: int
    only_predicted: int
    only_measured: int
    predicted_s: float
    measured_s: float
    error: float | None
    unmatched_predicted_s: float
    unmatched_measured_s: float


class PathRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of like spans on the critical path: ``seconds`` they took, ``idle_s`` before them."""

    name: str
    rank: str
    count: int
    seconds: float
    idle_s: float


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side as a whole. ``spread_s`` is the middle 80% of its steps, ``path`` the critical path of its median
    step, ``path_s`` that path by kind (``idle``: between its tasks)."""

    source: str
    identity: dict[str, str]
    num_steps: int
    num_spans: int
    step_time_s: float
    spread_s: tuple[float, float]
    bubble: float
    exposed_s: dict[str, float]
    peak_memory_bytes: float
    path: tuple[PathRun, ...]
    path_s: dict[str, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted against measured. ``within_spread``: the predicted step time lies where the repeats do, so it is right
    as far as they can tell; whether its parts are is another question (``cancelling``). ``rates`` are what follows from
    the step time where the prediction is known, and not only its timeline. ``differ`` are words of the identity that
    are not the same on both sides. ``pace`` is that of a machine whose own profile predicts, against when that was
    made, and ``at_pace`` the step as it would have been then; None where that is not known."""

    format_version: int
    predicted: Side
    measured: Side
    step_time_s: Pair
    rates: tuple[Pair, ...]
    within_spread: bool
    kinds: tuple[Row, ...]
    queues: tuple[Row, ...]
    bubble: Pair
    exposed_s: tuple[Pair, ...]
    peak_memory_bytes: Pair | None
    differ: dict[str, tuple[str, str]]
    pace: MachinePace | None = None
    at_pace: Pair | None = None

    @property
    def cancelling(self) -> tuple[Row, ...]:
        """Kinds of task whose errors make up for one another in the step time: those of one sign hide seconds of the
        other, the largest first; () where they are less than ``CANCEL`` of the step."""
        apart = {row: row.predicted_s - row.measured_s for row in self.kinds if row.matched}
        longer = sum(gap for gap in apart.values() if gap > 0)
        shorter = -sum(gap for gap in apart.values() if gap < 0)
        step_s = self.step_time_s.measured
        if min(longer, shorter) < CANCEL * step_s:
            return ()
        said = [row for row, gap in apart.items() if abs(gap) >= CANCEL / 2 * step_s]
        return tuple(sorted(said, key=lambda row: -abs(apart[row])))

    def to_json(self) -> dict[str, Any]:
        """Plain values, seconds and bytes."""
        said = {} if self.pace is None else {"pace": self.pace.to_json()}
        return msgspec.to_builtins(self) | {"cancelling": [row.name for row in self.cancelling]} | said


def compare(predicted: Timeline | Prediction, measured: Timeline) -> Comparison:
    """`predicted` against `measured`; either may hold several steps."""
    answer = predicted if isinstance(predicted, Prediction) else None
    predicted = answer.timeline if answer is not None else predicted
    ours, theirs = (
        [msgspec.structs.replace(s, timeline=joined(s.timeline)) for s in steps(t)] for t in (predicted, measured)
    )
    classes = _classes(predicted, measured)
    a = _units(ours, classes[0], _around(predicted, measured))
    b = _units(theirs, classes[1], _around(measured, predicted))
    a, b = _alike(a, b)
    left, right = _side(predicted, ours), _side(measured, theirs)
    if answer is not None and answer.round is not None:
        left = msgspec.structs.replace(left, step_time_s=answer.step_time_s)
        right = msgspec.structs.replace(right, step_time_s=_over_rounds(measured, round(answer.round.every)))
    low, high = right.spread_s
    names = {p: None for side in (left, right) for p in side.exposed_s}
    held = left.peak_memory_bytes if answer is None else answer.peak_memory_bytes
    drift, step = pace(predicted, measured), (left.step_time_s, right.step_time_s)
    return Comparison(
        format_version=FORMAT_VERSION,
        predicted=left,
        measured=right,
        step_time_s=_pair("step time", *step),
        rates=() if answer is None else _rates(answer, right.step_time_s),
        within_spread=low <= left.step_time_s <= high,
        kinds=_rows(a, b, lambda key: key[2]),
        queues=_rows(a, b, lambda key: key[1]),
        bubble=_pair("bubble", left.bubble, right.bubble),
        exposed_s=tuple(_pair(n, left.exposed_s.get(n, 0.0), right.exposed_s.get(n, 0.0)) for n in names),
        peak_memory_bytes=_pair("peak memory", held, right.peak_memory_bytes)
        if held and right.peak_memory_bytes
        else None,
        differ=_differences(predicted.identity, measured.identity),
        pace=drift,
        at_pace=None
        if drift is None
        else _pair("step time at the pace of the profile", step[0], step[1] / drift.slower),
    )


def _over_rounds(timeline: Timeline, every: int) -> float:
    """The mean of the last steps, as many as make whole rounds of `every`; of all where there are fewer."""
    times = repeats_s(timeline)
    whole = len(times) // every * every or len(times)
    return float(times[-whole:].mean())


def _pair(name: str, predicted: float, measured: float) -> Pair:
    error = predicted / measured - 1 if measured else None
    return Pair(name=name, predicted=predicted, measured=measured, error=error)


def _rates(answer: Prediction, step_s: float) -> tuple[Pair, ...]:
    """The answer's rates, and those of a step of another length."""
    predicted_s = answer.step_time_s
    tokens = answer.tokens_per_s_per_gpu * answer.num_devices * predicted_s
    mfu = answer.mfu
    return (
        _pair(f"{answer.train.counted}/s", tokens / predicted_s, tokens / step_s if step_s else 0.0),
        _pair("MFU", mfu, mfu * predicted_s / step_s if step_s else 0.0),
    )


def spread(times: Sequence[float]) -> tuple[float, float]:
    """The middle 80% of some times, which are one at least."""
    if len(times) < 2:
        return times[0], times[0]
    cuts = quantiles(times, n=_TENTHS, method="inclusive")
    return cuts[0], cuts[-1]


def _differences(a: Identity, b: Identity) -> dict[str, tuple[str, str]]:
    both = {word: (getattr(a, word), getattr(b, word)) for word in SAME}
    return {word: (left, right) for word, (left, right) in both.items() if left and right and left != right}


def _classes(a: Timeline, b: Timeline) -> tuple[list[str], list[str]]:
    """The class of every rank on both sides: the coarser side's names, else the place in the pipeline."""
    coarse, fine = (a, b) if len(a.ranks) <= len(b.ranks) else (b, a)
    found = [class_of(rank, coarse.ranks) for rank in fine.ranks]
    if min(found, default=-1) >= 0:
        names = [rank.name for rank in coarse.ranks]
        mapped = [names[i] for i in found]
        return (names, mapped) if coarse is a else (mapped, names)
    return tuple([RankClass(pool=rank.pool, stage=rank.stage).name for rank in t.ranks] for t in (a, b))


def _units(found: list[Step], classes: list[str], around: list[float] | None) -> dict[tuple, float]:
    """Seconds per rank of every key, the median of the steps."""
    seconds: dict[tuple, list[float]] = defaultdict(list)
    for step in found:
        for key, value in _of_step(step.timeline, classes, around).items():
            seconds[key].append(value)
    return {key: median(values) for key, values in seconds.items()}


def _alike(a: dict[tuple, float], b: dict[tuple, float]) -> tuple[dict[tuple, float], dict[tuple, float]]:
    """The same, with exchanges of a stage that one side has at once and the other in several as one on both."""
    cuts: tuple[dict[tuple, set[int]], ...] = (defaultdict(set), defaultdict(set))
    for side, found in zip((a, b), cuts):
        for key in side:
            if key[1] in TOGETHER and key[3] >= 0:
                found[key[:-1]].add(key[-1])
    whole = {
        k for k in cuts[0].keys() & cuts[1].keys() if 1 == min(len(c[k]) for c in cuts) < max(len(c[k]) for c in cuts)
    }

    def joined_up(side: dict[tuple, float]) -> dict[tuple, float]:
        out: dict[tuple, float] = defaultdict(float)
        for key, seconds in side.items():
            out[(*key[:-1], -1) if key[:-1] in whole else key] += seconds
        return out

    return joined_up(a), joined_up(b)


def _of_step(timeline: Timeline, classes: list[str], around: list[float] | None) -> dict[tuple, float]:
    total: dict[tuple, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    multiplicity = timeline.multiplicity
    for name, many in zip(classes, multiplicity):
        count[name] += many
    length = timeline.end_s - timeline.start_s
    columns = (timeline.rank, timeline.queue, timeline.kind, timeline.cost_key, *timeline.attributes[[0, 2, 3]], length)
    for rank, queue, kind, cost_key, stage, microbatch, layer, took in zip(*(c.tolist() for c in columns)):
        name, where = classes[rank], QUEUES[queue]
        share = multiplicity[rank] / count[name]
        if where in TOGETHER:
            what = TOGETHER[where] if stage >= 0 or where != "dp" else NORM
            key = name, where, what, stage, layer
        else:
            key = name, where, KINDS[kind], stage, microbatch
        if kind == KIND["optimizer"] and around is not None and (part := around[cost_key]):
            total[name, where, AROUND, stage, microbatch] += took * share * part
            took *= 1 - part
        total[key] += took * share
    return total


def _around(timeline: Timeline, other: Timeline) -> list[float] | None:
    """Return the share of each cost key's duration that is the host's, None where a timeline does not say or is laid
    beside another that was not measured: of an optimizer's task, what a run does outside of the update it records."""
    if "host" not in timeline.parts or other.identity.source != "measured":
        return None
    whole = np.sum(list(timeline.parts.values()), axis=0)
    return np.divide(timeline.parts["host"], whole, out=np.zeros_like(whole), where=whole > 0).tolist()


def _rows(a: dict[tuple, float], b: dict[tuple, float], group) -> tuple[Row, ...]:
    """One row per kind or queue, the longest first. A class's seconds are a rank's, so rows are means over classes."""
    classes = len({key[0] for key in (*a, *b)}) or 1
    names = {group(key): None for key in (*a, *b)}
    rows = []
    for name in names:
        mine, others = ({k: v for k, v in side.items() if group(k) == name} for side in (a, b))
        both = mine.keys() & others.keys()
        predicted, measured = (sum(side[k] for k in sorted(both)) / classes for side in (mine, others))
        rows.append(
            Row(
                name=name,
                matched=len(both),
                only_predicted=len(mine) - len(both),
                only_measured=len(others) - len(both),
                predicted_s=predicted,
                measured_s=measured,
                error=predicted / measured - 1 if measured else None,
                unmatched_predicted_s=sum(v for k, v in mine.items() if k not in both) / classes,
                unmatched_measured_s=sum(v for k, v in others.items() if k not in both) / classes,
            )
        )
    return tuple(sorted(rows, key=lambda r: -max(r.measured_s + r.unmatched_measured_s, r.predicted_s)))


def _side(timeline: Timeline, found: list[Step]) -> Side:
    times = repeats_s(timeline).tolist()
    chosen = middle(found)
    links = _path(chosen.timeline)
    by_kind: dict[str, float] = defaultdict(float)
    for kind, seconds, idle in links[1]:
        by_kind[kind] += seconds
        by_kind["idle"] += idle
    by_kind["idle"] += max(chosen.seconds - sum(by_kind.values()), 0.0)
    return Side(
        source=timeline.identity.source,
        identity={word: text for word, text in timeline.identity.said().items() if word in SAME},
        num_steps=len(times),
        num_spans=timeline.num_spans,
        step_time_s=median(times),
        spread_s=spread(times),
        bubble=fmean(s.timeline.bubble() for s in found),
        exposed_s=_exposed(found),
        peak_memory_bytes=float(peak_bytes(timeline).max(initial=0.0)),
        path=links[0],
        path_s={k: v for k, v in by_kind.items() if v > RESOLUTION_S},
    )


def _exposed(found: list[Step]) -> dict[str, float]:
    """Seconds of each queue that no pass hides, mean over ranks and steps."""
    out: dict[str, float] = defaultdict(float)
    for step in found:
        timeline = step.timeline
        count = sum(timeline.multiplicity) * len(found)
        for rank, multiplicity in enumerate(timeline.multiplicity):
            for queue, seconds in timeline.exposed_comm(rank).items():
                out[queue] += max(seconds, 0.0) * multiplicity / count
    return dict(out)


def _path(timeline: Timeline) -> tuple[tuple[PathRun, ...], list[tuple[str, float, float]]]:
    """The critical path as runs of like spans, and span by span as (kind, seconds, idle before it)."""
    path = timeline.critical_path().tolist()
    links: list[PathRun] = []
    parts: list[tuple[str, float, float]] = []
    before = 0.0
    for span in path:
        start, end = float(timeline.start_s[span]), float(timeline.end_s[span])
        # spans of a collective's other member may overlap: only what goes beyond the one before counts
        seconds, idle = max(end - max(start, before), 0.0), start - before
        idle = idle if idle > RESOLUTION_S else 0.0
        before = max(before, end)
        queue, stage = QUEUES[timeline.queue[span]], int(timeline.attributes[0, span])
        kind = KINDS[timeline.kind[span]]
        what = (TOGETHER[queue] if stage >= 0 or queue != "dp" else NORM) if queue in TOGETHER else kind
        name = f"{what} s{stage}" if stage >= 0 else what
        rank = timeline.ranks[timeline.rank[span]].name
        parts.append((what, seconds, idle))
        if links and (links[-1].name, links[-1].rank) == (name, rank):
            last = links[-1]
            links[-1] = PathRun(
                name=name, rank=rank, count=last.count + 1, seconds=last.seconds + seconds, idle_s=last.idle_s + idle
            )
        else:
            links.append(PathRun(name=name, rank=rank, count=1, seconds=seconds, idle_s=idle))
    return tuple(links), parts


def worst(comparison: Comparison) -> Iterable[Row]:
    """Kinds by how much of the step's error they could explain, the largest first."""
    return sorted(comparison.kinds, key=lambda r: -abs(r.predicted_s - r.measured_s))


def mean_error(rows: Iterable[Row]) -> float | None:
    """Mean size of the rows' errors, weighted by what was measured."""
    known = [(abs(r.error), r.measured_s) for r in rows if r.error is not None]
    total = sum(w for _, w in known)
    return float(np.sum([e * w for e, w in known]) / total) if total else None
