"""The task graph behind a timeline: streams in the order they ran in, and who waits for whom by what the spans are.

Tasks say who needs whom, so a dependency need not have been binding to be known (Zhu et al., Daydream, 2006.03318;
Hu et al., dPRO, 2205.02473):

* a send needs the last span of the pass whose result it carries and holds up the first span of the pass of the next
  stage; without a send the passes hang together directly;
* an exchange of gradients needs the backward span of its stage, microbatch and layer, or the rank's last pass where
  none of the rank's exchanges began before that; a gather of parameters holds up the pass that it is for, begins at
  most as many passes ahead as any gather did, and where nothing is computed during exchanges of gradients comes behind
  the one before it;
* the optimizer needs every exchange on its rank; any other collective the last pass that had ended on each member;
* what a span is known to have waited for (``waited_for``) it needs.

A span of another queue that lies inside a pass (a tensor-parallel collective, or an exchange of layers that are fully
sharded, where it was not cut out of it) is part of it. A pass during which an exchange begins is cut there
(:mod:`meshwright.replay.tasks`). Time before a task that no dependency explains is kept as host time in front of it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.graph import Lane
from meshwright.plan import Plan
from meshwright.replay.tasks import (
    EPSILON_S,
    FULLY_SHARDED,
    PASSES,
    ComputeSpans,
    Rebuilt,
    Task,
    cut,
    layer_base,
    tasks_of,
    without_inner,
)
from meshwright.timeline import Timeline


def rebuild(timeline: Timeline, plan: Plan | None = None, tail_s: float = 0.0) -> Rebuilt:
    """The tasks of one step's timeline and what each waits for. `plan` says whether sends and exchanges overlap
    compute; without it the spans do."""
    tasks, position = tasks_of(timeline), {}
    tasks = without_inner(tasks, timeline, FULLY_SHARDED if plan is not None and plan.layout.gathers_again else ())
    tasks = cut(tasks)
    for i, task in enumerate(tasks):
        task.number = i
        for span in task.spans:
            position.setdefault(span, i)
    lanes = [rank.lane for rank in timeline.ranks]
    blocking = _sends(tasks, lanes, plan)
    late = _exchanges(tasks, plan, timeline)
    _recorded(tasks, timeline, position)
    for task in tasks:
        # an edge against the order of start would be no dependency of what ran
        task.needs = {n for n in task.needs if n < task.number}
    seconds = np.array([t.seconds for t in tasks])
    return Rebuilt(
        timeline=timeline,
        tasks=tuple(tasks),
        seconds=seconds,
        wait_s=_waits(tasks),
        tail_s=tail_s,
        blocking=blocking,
        late=frozenset(late),
        direct=plan is not None and not plan.several and not plan.feedback.exact,
    )


def _sends(tasks: list[Task], lanes: list[Lane], plan: Plan | None) -> bool:
    """Pass to send to pass, or pass to pass where nothing was sent. Whether a rank waits until what it sends is out."""
    first: dict[tuple, Task] = {}
    last: dict[tuple, Task] = {}
    sent: dict[tuple, Task] = {}
    for task in tasks:
        lane = lanes[task.ranks[0]]
        for letter in PASSES.get(task.kind, "").split():
            first.setdefault((letter, lane, task.stage, task.microbatch), task)
            last[letter, lane, task.stage, task.microbatch] = task
        if task.kind == "send" and task.queue in ("pp_forward", "pp_backward"):
            sent["F" if task.queue == "pp_forward" else "B", lane, task.stage, task.microbatch] = task
    direct = plan is not None and not plan.several and not plan.feedback.exact
    if direct:
        _errors(first, last, sent)
    for (letter, lane, stage, microbatch), made_by in last.items():
        if letter == "W" or (letter == "B" and direct):
            continue
        send = sent.get((letter, lane, stage, microbatch))
        following = first.get((letter, lane, stage + (1 if letter == "F" else -1), microbatch))
        if send is not None:
            send.needs = send.needs | {_at_start(tasks, made_by, send)}
        if following is not None:
            following.needs = following.needs | {(send or made_by).number}
    blocking = _blocking(tasks, sent, plan)
    if blocking:
        after = _following(tasks)
        for (letter, lane, stage, microbatch), send in sent.items():
            made_by = (
                _error_of(last, lane, microbatch) if direct and letter == "B" else last[letter, lane, stage, microbatch]
            )
            blocked = after.get(made_by.number)
            if blocked is not None:
                blocked.needs = blocked.needs | {send.number}
    return blocking


def _errors(first: dict[tuple, Task], last: dict[tuple, Task], sent: dict[tuple, Task]) -> None:
    """The output's error: from the last stage's forward, over what was sent to a rank if anything was, to the backwards
    of all stages there."""
    brought: dict[tuple, Task] = {}
    for (letter, lane, stage, microbatch), send in sent.items():
        entered = first.get((letter, lane, stage - 1, microbatch)) if letter == "B" else None
        if entered is not None:
            send.needs = send.needs | {_error_of(last, lane, microbatch).number}
            brought[lane, microbatch, entered.ranks[0]] = send
    for (letter, lane, _, microbatch), entered in first.items():
        if letter == "B":
            made_by = brought.get((lane, microbatch, entered.ranks[0])) or _error_of(last, lane, microbatch)
            entered.needs = entered.needs | {made_by.number}


def _error_of(last: dict[tuple, Task], lane: Lane, microbatch: int) -> Task:
    """The last stage's forward of a microbatch."""
    final = max(stage for letter, _, stage, _ in last if letter == "F")
    return last["F", lane, final, microbatch]


def _at_start(tasks: list[Task], made_by: Task, transfer: Task) -> int:
    """The last piece of a pass that had ended when its transfer began: a pass that was cut has several."""
    number = made_by.number
    while number > 0 and tasks[number].end_s > transfer.start_s + EPSILON_S:
        earlier = next((n for n in range(number - 1, -1, -1) if tasks[n].spans == made_by.spans), None)
        if earlier is None:
            return made_by.number
        number = earlier
    return number


def _following(tasks: list[Task]) -> dict[int, Task]:
    """The next compute task of the same rank, by number."""
    found = ComputeSpans(tasks).of.values()
    return {a.number: b for one in found for a, b in pairwise(one)}


def _blocking(tasks: list[Task], sent: dict[tuple, Task], plan: Plan | None) -> bool:
    """Whether a rank waits until its message has been sent."""
    if plan is not None or not sent:
        return plan is not None and not plan.overlap.pp
    passes = ComputeSpans(tasks)
    return all(passes.running(s.ranks[0], (s.start_s + s.end_s) / 2) is None for s in sent.values())


def _exchanges(tasks: list[Task], plan: Plan | None, timeline: Timeline) -> set[int]:
    """Gradients after their backward, gathers before their pass, the optimizer after all, the rest after what ran.
    The ranks that exchange gradients only after their last pass."""
    passes = ComputeSpans(tasks)
    passes_only = ComputeSpans(tasks, passes_only=True)
    makers = _segments(tasks)
    late = _late_ranks(tasks, passes_only, plan)
    layers = layer_base(tasks)
    arrived: dict[int, list[Task]] = defaultdict(list)
    gathers: dict[int, list[tuple[Task, Task]]] = defaultdict(list)
    needed: list[tuple[Task, float]] = []
    for task in tasks:
        if task.kind == "optimizer":
            task.needs = task.needs | {t.number for t in arrived[task.ranks[0]]}
        if task.queue == "compute" or task.kind == "send":
            continue
        for rank in task.ranks:
            if task.queue == "dp":
                arrived[rank].append(task)
            if task.queue == "dp_gather" and task.microbatch >= 0:
                used = _used_by(makers, task, rank, layers, _left(task, rank, timeline))
                if used is not None:
                    used.needs = used.needs | {task.number}
                    needed.append((task, _left(task, rank, timeline)))
                    gathers[rank].append((task, used))
                continue
            made_by = None
            if task.queue == "dp" and task.stage >= 0 and task.microbatch >= 0 and rank not in late:
                made_by = _made_by(makers, task, rank, layers)
            made_by = made_by or passes.ended(rank, task.start_s)
            if made_by is not None:
                task.needs = task.needs | {made_by.number}
    for rank, found in gathers.items():
        _prefetch(passes.of[rank], found)
    following = _following(tasks)
    for rank, found in arrived.items():
        # where nothing is computed during any exchange of gradients, the next pass waits for it
        mine = [t for t in found if t.microbatch >= 0]
        if all(passes.running(rank, (t.start_s + _left(t, rank, timeline)) / 2) is None for t in mine):
            for task in mine:
                before = passes.ended(rank, task.start_s)
                blocked = following.get(before.number) if before is not None else None
                if blocked is not None:
                    blocked.needs = blocked.needs | {task.number}
                    needed.append((task, _left(task, rank, timeline)))
            for gather, _ in gathers[rank]:  # nor is anything gathered meanwhile: calls come one after the other
                over = [t for t in mine if _left(t, rank, timeline) <= gather.start_s + EPSILON_S]
                if over:
                    gather.needs = gather.needs | {max(over, key=lambda t: t.end_s).number}
    for task, left_s in needed:
        # over when a pass could first go on: what other ranks took longer to wake up is host time in front of theirs
        task.end_s = max(min(task.end_s, left_s), task.start_s)
    return late


def _segments(tasks: list[Task]) -> dict[tuple, list[Task]]:
    """Compute tasks by (rank, stage, microbatch), in order."""
    out: dict[tuple, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.is_pass:
            out[task.ranks[0], task.stage, task.microbatch].append(task)
    return out


def _made_by(makers: dict[tuple, list[Task]], task: Task, rank: int, layers: dict) -> Task | None:
    """The backward span whose gradients are exchanged: of the layer, or the last that had ended."""
    found = [t for t in makers[rank, task.stage, task.microbatch] if t.kind in ("BW", "W")]
    layer = task.layer + layers.get((task.stage, task.queue), 0)
    same = [t for t in found if t.layer == layer and task.layer >= 0]
    ended = [t for t in same or found if t.end_s <= task.start_s + EPSILON_S]
    return ended[-1] if ended else None


def _left(task: Task, rank: int, timeline: Timeline) -> float:
    """Return the end of a collective on a rank, which may be before others'."""
    return float(timeline.end_s[task.spans[task.ranks.index(rank)]])


def _used_by(
    makers: dict[tuple, list[Task]], task: Task, rank: int, layers: dict[tuple[int, str], int], left_s: float
) -> Task | None:
    """The first pass over the gathered layer that begins after the rank has it."""
    layer = task.layer + layers.get((task.stage, task.queue), 0)
    found = [t for t in makers[rank, task.stage, task.microbatch] if t.start_s >= left_s - EPSILON_S]
    same = [t for t in found if task.layer < 0 or t.layer in (-1, layer)]
    return same[0] if same else None


def _late_ranks(tasks: list[Task], passes: ComputeSpans, plan: Plan | None) -> set[int]:
    """Ranks that exchange gradients only after their last pass."""
    said = None if plan is None else not plan.overlap.dp
    out = set()
    for rank, found in passes.of.items():
        mine = [t for t in tasks if t.queue == "dp" and t.stage >= 0 and rank in t.ranks]
        if mine and all(t.start_s >= found[-1].end_s - EPSILON_S for t in mine) and said is not False:
            out.add(rank)
    return out


def _prefetch(order: list[Task], gathers: list[tuple[Task, Task]]) -> None:
    """Make each gather depend on the pass before its own by the prefetch depth: the most passes that any measured
    gather was ahead of the pass that uses it."""
    at = {t.number: i for i, t in enumerate(order)}
    ends = np.array([t.end_s for t in order])
    before = [int(np.searchsorted(ends, g.start_s + EPSILON_S, side="right")) - 1 for g, _ in gathers]
    depth = max(at[used.number] - done for (_, used), done in zip(gathers, before))
    for gather, used in gathers:
        need = at[used.number] - depth
        if need >= 0:
            gather.needs = gather.needs | {order[need].number}


def _recorded(tasks: list[Task], timeline: Timeline, position: dict[int, int]) -> None:
    """Add to each task's needs the task that the timeline itself recorded as the one it waited for."""
    last = {span: i for i, task in enumerate(tasks) for span in task.spans}
    first_piece: set[int] = set()
    for task in tasks:
        if task.spans[0] in first_piece:
            continue
        first_piece.add(task.spans[0])
        for span in task.spans:
            cause = last.get(int(timeline.waited_for[span]))
            if cause is not None and tasks[cause].end_s <= task.start_s + EPSILON_S:
                task.needs = task.needs | {cause}


def _waits(tasks: list[Task]) -> NDArray[np.float64]:
    """Seconds between when each task could have started and when it did."""
    free: dict[tuple[int, str], float] = {}
    out = np.zeros(len(tasks))
    for task in tasks:
        before = [tasks[n].end_s for n in task.needs] + [free.get((r, task.queue), 0.0) for r in task.ranks]
        out[task.number] = max(task.start_s - max(before), 0.0)
        for rank in task.ranks:
            free[rank, task.queue] = task.end_s
    return out
