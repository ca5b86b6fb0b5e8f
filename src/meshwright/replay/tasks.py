"""The tasks of a timeline: spans that are one, without the collectives inside passes; passes cut where a transfer of
theirs begins."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.compare.measured import task_numbers
from meshwright.graph import KINDS, QUEUES
from meshwright.timeline import Timeline

#: Queues whose collectives a pass waits for inside itself.
INNER = ("tp", "cp", "ep", "dp_gather")
#: Queues of the exchanges of fully sharded layers.
FULLY_SHARDED = ("dp", "dp_gather")
#: The passes of each kind of compute task.
PASSES = {"F": "F", "B": "B", "BW": "B W", "W": "W"}
#: Times closer than this are the same: a trace's rounding.
EPSILON_S = 2e-9


class Task(msgspec.Struct):
    """A task as it ran: ``spans`` are its members', ``inner_s`` the seconds of spans inside it by queue, ``needs`` the
    tasks it waits for."""

    number: int
    kind: str
    queue: str
    stage: int
    chunk: int
    microbatch: int
    layer: int
    ranks: tuple[int, ...]
    spans: list[int]
    start_s: float
    end_s: float
    key: str
    inner_s: dict[tuple[str, str], float] = {}
    needs: set[int] = set()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_pass(self) -> bool:
        return self.kind in PASSES


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one step in order of start; per task how long it takes and the host time ``wait_s`` in front of it.

    ``tail_s`` is what the step goes on after its last task. ``blocking``: a rank waits until what it sends is out;
    ``late`` are the ranks that exchange gradients only after their last pass; ``beyond``: parameters are still being
    gathered when the step is over; ``direct``: the output's error went to all stages in place of gradients.
    """

    timeline: Timeline
    tasks: tuple[Task, ...]
    seconds: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    tail_s: float = 0.0
    blocking: bool = False
    late: frozenset[int] = frozenset()
    beyond: bool = False
    direct: bool = False


def tasks_of(timeline: Timeline) -> list[Task]:
    """One task per task of the timeline, in order of start; a collective starts when the last member does."""
    found: dict[int, list[int]] = defaultdict(list)
    number = task_numbers(timeline)
    for span in np.lexsort((timeline.task, timeline.end_s, timeline.start_s)).tolist():
        found[int(number[span])].append(span)
    attributes = timeline.attributes.T.tolist()
    out = []
    for spans in found.values():
        first = spans[0]
        stage, chunk, microbatch, layer, _ = attributes[first]
        out.append(
            Task(
                number=0,
                kind=KINDS[timeline.kind[first]],
                queue=QUEUES[timeline.queue[first]],
                stage=stage,
                chunk=chunk,
                microbatch=microbatch,
                layer=layer,
                ranks=tuple(int(timeline.rank[s]) for s in spans),
                spans=spans,
                start_s=max(float(timeline.start_s[s]) for s in spans),
                end_s=max(float(timeline.end_s[s]) for s in spans),
                key=timeline.keys[timeline.cost_key[first]],
            )
        )
    return _ordered(out)


def _ordered(tasks: list[Task]) -> list[Task]:
    return sorted(tasks, key=lambda t: (t.start_s, t.end_s, t.spans[0]))


class ComputeSpans:
    """The compute spans of every rank in order, to find the one that is running, or ran last, at an instant."""

    def __init__(self, tasks: list[Task], *, passes_only: bool = False):
        self.of: dict[int, list[Task]] = defaultdict(list)
        for task in tasks:
            if task.queue == "compute" and (task.is_pass or not passes_only):
                self.of[task.ranks[0]].append(task)
        self._starts = {rank: np.array([t.start_s for t in found]) for rank, found in self.of.items()}
        self._ends = {rank: np.array([t.end_s for t in found]) for rank, found in self.of.items()}

    def running(self, rank: int, at_s: float) -> Task | None:
        """The one that began before the instant and ends after it."""
        if rank not in self.of:
            return None
        i = int(np.searchsorted(self._starts[rank], at_s - EPSILON_S)) - 1
        return self.of[rank][i] if i >= 0 and self._ends[rank][i] > at_s + EPSILON_S else None

    def ended(self, rank: int, by_s: float) -> Task | None:
        """The last that had ended by the instant."""
        if rank not in self.of:
            return None
        i = int(np.searchsorted(self._ends[rank], by_s + EPSILON_S, side="right")) - 1
        return self.of[rank][i] if i >= 0 else None


def without_inner(tasks: list[Task], timeline: Timeline, waited: tuple[str, ...] = ()) -> list[Task]:
    """Return the tasks without the collectives that lie inside a pass on every member, which are part of the pass.
    Whole passes wait for collectives of the queues `waited`."""
    passes, out = ComputeSpans(tasks), []
    for task in tasks:
        inner = task.queue in INNER or task.queue in waited
        around = [_around(passes, s, task, timeline, waited) for s in task.spans] if inner else [None]
        if any(a is None for a in around):
            out.append(task)
            continue
        for outer in around:
            what = (task.kind, task.queue)
            outer.inner_s = outer.inner_s | {what: outer.inner_s.get(what, 0.0) + task.seconds}
    return out


def _around(passes: ComputeSpans, span: int, task: Task, timeline: Timeline, waited: tuple[str, ...]) -> Task | None:
    """The pass of the same rank that one member of a collective lies inside."""
    found = passes.running(int(timeline.rank[span]), float(timeline.start_s[span]))
    if found is None or timeline.end_s[span] > found.end_s + EPSILON_S:
        return None
    if task.queue in waited:
        return found if task.stage == found.stage and found.layer < 0 else None
    # a gather for a later pass only happens to run meanwhile
    ahead = task.queue == "dp_gather" and (task.stage, task.microbatch) != (found.stage, found.microbatch)
    ahead = ahead or (task.queue == "dp_gather" and found.layer >= 0)
    return None if ahead else found


def cut(tasks: list[Task]) -> list[Task]:
    """Passes cut where an exchange or a send of theirs begins."""
    passes, layers = ComputeSpans(tasks), layer_base(tasks)
    cuts: dict[int, set[float]] = defaultdict(set)
    for task in tasks:
        if task.queue != "compute":
            for rank in task.ranks:
                during = passes.running(rank, task.start_s)
                if during is not None and _carries(task, during, layers):
                    cuts[id(during)].add(task.start_s)
    out = []
    for task in tasks:
        at = [task.start_s, *sorted(cuts.get(id(task), ())), task.end_s]
        for start, end in pairwise(at):
            share = (end - start) / task.seconds if len(at) > 2 else 1.0
            inner = {what: seconds * share for what, seconds in task.inner_s.items()}
            out.append(msgspec.structs.replace(task, start_s=start, end_s=end, inner_s=inner))
    return _ordered(out)


def _carries(task: Task, made_by: Task, layers: dict[tuple[int, str], int]) -> bool:
    """Whether a transfer that began during a pass is of its making."""
    same = task.stage in (-1, made_by.stage) and task.microbatch in (-1, made_by.microbatch)
    if task.layer >= 0 and made_by.layer >= 0:
        same = same and task.layer + layers.get((task.stage, task.queue), 0) == made_by.layer
    return same and task.queue in ("dp", "pp_forward", "pp_backward") and made_by.is_pass


def layer_base(tasks: list[Task]) -> dict[tuple[int, str], int]:
    """Return the offset from an exchange's layer number to a pass's, by (stage, queue); 0 where both count alike.

    Exchanges may count layers from their stage's first."""
    first: dict[int, int] = {}
    lowest: dict[tuple[int, str], int] = {}
    for task in tasks:
        if task.layer >= 0 and task.is_pass:
            first[task.stage] = min(first.get(task.stage, task.layer), task.layer)
        elif task.layer >= 0:
            where = task.stage, task.queue
            lowest[where] = min(lowest.get(where, task.layer), task.layer)
    return {where: first.get(where[0], 0) if low < first.get(where[0], 0) else 0 for where, low in lowest.items()}
