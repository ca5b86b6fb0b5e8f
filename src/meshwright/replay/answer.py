"""A replay: the measured step rebuilt and timed, then the step with the changes, and their difference."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import msgspec

from meshwright.compare.measured import step_times
from meshwright.graph import KINDS
from meshwright.replay.reschedule import reschedule
from meshwright.replay.timed import step_seconds, timed, typical
from meshwright.replay.whatif import rebucketed, scaled
from meshwright.timeline import Timeline

FORMAT_VERSION = 1


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The changes asked for: ``factors`` of times by kind or queue, another schedule, another size of buckets in bytes.

    Without any change the measured step itself is timed anew."""

    factors: dict[str, float] = {}
    schedule: str = ""
    vpp: int | None = None
    weight_share: float | None = None
    bucket_bytes: int = 0

    def words(self) -> list[str]:
        """Each change in words."""
        out = [f"{name} takes x{factor:g}" for name, factor in self.factors.items()]
        if self.schedule:
            out.append(f"schedule {self.schedule}" + (f" vpp{self.vpp}" if self.vpp else ""))
        if self.bucket_bytes:
            out.append(f"buckets of {self.bucket_bytes:,} bytes")
        return out


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """``replayed_s`` is the measured step rebuilt and timed again, ``error`` how far that is from ``measured_s`` (the
    median of ``num_steps``); ``step_time_s`` the step as asked. ``kinds`` are seconds per rank by kind of task, before
    and after; ``timeline`` the step as asked."""

    format_version: int
    measured_s: float
    num_steps: int
    replayed_s: float
    error: float
    changes: tuple[str, ...]
    step_time_s: float
    change: float
    kinds: dict[str, tuple[float, float]]
    bubble: tuple[float, float]
    exposed_s: dict[str, tuple[float, float]]
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values without the timeline, which a trace file holds."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "timeline"}


def replay(measured: Timeline, asked: Asked) -> Replay:
    """Replay the measured step with the changes asked for: times first, then buckets, then the schedule.

    Raises:
        MeshwrightError: X106 for a word or number that makes no sense, X107 when the trace does not say enough, S codes
            when the schedule is not legal.
    """
    base = typical(measured)
    before = timed(base)
    changed = scaled(base, asked.factors)
    if asked.bucket_bytes:
        changed = rebucketed(changed, asked.bucket_bytes)
    if asked.schedule:
        changed = reschedule(changed, asked.schedule, vpp=asked.vpp, weight_share=asked.weight_share)
    after = timed(changed) if changed is not base else before
    times = step_times(measured)
    took = median(times.tolist())
    step = [step_seconds(base, t) for t in (before, after)]
    return Replay(
        format_version=FORMAT_VERSION,
        measured_s=took,
        num_steps=len(times),
        replayed_s=step[0],
        error=step[0] / took - 1,
        changes=tuple(asked.words()),
        step_time_s=step[1],
        change=step[1] / step[0] - 1,
        kinds=_both(before, after, _kinds),
        bubble=(before.bubble(), after.bubble()),
        exposed_s=_both(before, after, _exposed),
        timeline=after,
    )


def _both(a: Timeline, b: Timeline, measure) -> dict[str, tuple[float, float]]:
    left, right = measure(a), measure(b)
    return {name: (left.get(name, 0.0), right.get(name, 0.0)) for name in dict.fromkeys((*left, *right))}


def _kinds(timeline: Timeline) -> dict[str, float]:
    """Seconds per rank by kind of task."""
    out: dict[str, float] = defaultdict(float)
    multiplicity = timeline.multiplicity
    count = sum(multiplicity)
    seconds = timeline.end_s - timeline.start_s
    for rank, kind, took in zip(timeline.rank.tolist(), timeline.kind.tolist(), seconds.tolist()):
        out[KINDS[kind]] += took * multiplicity[rank] / count
    return dict(out)


def _exposed(timeline: Timeline) -> dict[str, float]:
    """Seconds per rank that no pass hides, by queue."""
    out: dict[str, float] = defaultdict(float)
    count = sum(timeline.multiplicity)
    for rank, multiplicity in enumerate(timeline.multiplicity):
        for queue, took in timeline.exposed_comm(rank).items():
            out[queue] += max(took, 0.0) * multiplicity / count
    return dict(out)
