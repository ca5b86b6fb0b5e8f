"""Diagnosis: which rank or link of a job is slow, or which rank hangs, read off the times of collectives and passes.

Collectives and passes are periodic and alike: the same work on other ranks says how long it should take (C4D, Dong et
al., 2406.04594, section 4). A rank whose own work between communications takes longer than its peers' is slow. Of slow
messages and collectives the rank or the pair of ranks is blamed that explains most of them and is part of the fewest
that are not slow. Who waits for whom is a matrix; a rank whose peers all wait for it and that waits for nobody is slow
or hangs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.compare.measured import Step, steps
from meshwright.errors import MeshwrightError
from meshwright.replay.ideal import Ideal, Slowdowns
from meshwright.replay.rebuild import rebuild
from meshwright.replay.tasks import PASSES, Rebuilt, Task
from meshwright.replay.timed import plan_of
from meshwright.timeline import Timeline

#: By so much longer than its like something has to take to be called slow.
ABOVE = 0.1
#: Steps that are looked at, and ranks whose slowdown is worked out each for itself.
MOST_STEPS, MOST_RANKS = 8, 64


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is slow or hangs: ``what`` is ``rank`` (its own work), ``nic`` (all its messages), ``link``
    (those between two ranks), ``group`` (a collective whose members cannot be told apart) or ``hung``; ``ranks`` index
    the timeline's. It takes ``factor`` times as long as its like, by ``seen`` observations."""

    what: str
    ranks: tuple[int, ...]
    factor: float
    seen: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a job: ``suspects``, the worst first; ``waits_s[source, target]``, seconds of a step that one
    rank waited for another in collectives and messages; and what the step would take without stragglers."""

    names: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    waits_s: NDArray[np.float64]
    slowdowns: Slowdowns
    num_steps: int


class _Seen(msgspec.Struct):
    """A message or a collective between ranks: how many times as long as its like it took, and whether that is slow."""

    ranks: tuple[int, ...]
    ratio: float
    slow: bool
    message: bool


def diagnose(timeline: Timeline, *, above: float = ABOVE) -> Diagnosis:
    """Find what is slow by more than the share `above`, and what hangs.

    Raises:
        MeshwrightError: X107 for a timeline without spans, of one rank, or in which ranks that are alike are one.
    """
    rebuilt, hung = _looked_at(timeline)
    found = _suspects(rebuilt, hung, above)
    count = len(timeline.ranks)
    shown = range(count) if count <= MOST_RANKS else sorted({rank for one in found for rank in one.ranks})
    return Diagnosis(
        names=tuple(rank.name for rank in timeline.ranks),
        suspects=tuple(found),
        waits_s=_waits(rebuilt, count),
        slowdowns=Ideal(rebuilt, stages=not _replicated(timeline)).slowdowns(shown),
        num_steps=len(rebuilt),
    )


def suspects(timeline: Timeline, *, above: float = ABOVE) -> tuple[Suspect, ...]:
    """Find what is slow, and what hangs, as :func:`diagnose` does, without what it costs."""
    return tuple(_suspects(*_looked_at(timeline), above))


def _looked_at(timeline: Timeline) -> tuple[list[Rebuilt], list[Suspect]]:
    """Some whole steps of a timeline, and what its last step hangs at."""
    why = ""
    if not timeline.num_spans:
        why = "it has no spans"
    elif len(timeline.ranks) < 2:
        why = "it is of one rank, and nothing else is like it"
    elif any(rank.multiplicity > 1 and not rank.at for rank in timeline.ranks):
        why = "ranks that are alike are one in it, as in a prediction of ranks that are all well"
    if why:
        help = "trace a run of several ranks, or a prediction with a slow one: --world slow=0x1.5"
        message = f"the trace cannot say what is slow: {why}"
        raise MeshwrightError.one("X107", message, place="meshwright diagnose", help=help)
    hung, whole = _hung(steps(timeline), timeline)
    chosen = sorted(whole, key=lambda s: s.seconds)[len(whole) // 4 :][:MOST_STEPS]
    plan = plan_of(timeline)
    return [rebuild(step.timeline, plan) for step in chosen], hung


def _suspects(rebuilt: list[Rebuilt], hung: list[Suspect], above: float) -> list[Suspect]:
    found = [*hung, *_slow_ranks(rebuilt, above), *_slow_links(rebuilt, above)]
    return sorted(found, key=lambda one: (one.what != "hung", -one.factor))


def _replicated(timeline: Timeline) -> bool:
    """Whether every stage has several ranks, which are alike."""
    stages = [rank.stage for rank in timeline.ranks]
    return all(stages.count(stage) > 1 for stage in set(stages))


# -- ranks


def _slow_ranks(found: Sequence[Rebuilt], above: float) -> list[Suspect]:
    """Ranks whose own work takes longer than that of all their peers."""
    alike = _replicated(found[0].timeline)
    took: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        for task, seconds in zip(one.tasks, one.seconds.tolist()):
            if task.queue == "compute" and task.kind in PASSES:
                own = max(seconds - sum(task.inner_s.values()), 0.0)  # what it waits for inside is no work of its own
                what = (task.kind, task.chunk, task.layer, task.stage if alike else -1)
                took[what][task.ranks[0]].append(own)
    ratios: dict[int, list[float]] = defaultdict(list)
    for by_rank in took.values():
        middle = {rank: median(values) for rank, values in by_rank.items()}
        for rank, own in middle.items():
            others = [seconds for other, seconds in middle.items() if other != rank]
            if others and median(others) > 0:
                ratios[rank] += [own / median(others)] * len(by_rank[rank])
    return [
        Suspect(what="rank", ranks=(rank,), factor=median(values), seen=len(values))
        for rank, values in sorted(ratios.items())
        if median(values) > 1 + above
    ]


# -- links


def _slow_links(found: Sequence[Rebuilt], above: float) -> list[Suspect]:
    """Pairs, ranks or groups that explain slow messages and collectives, those that explain most first."""
    left = _observations(found, above)
    suspects = []
    while any(one.slow for one in left):
        ranks = _blamed(left)
        explained = [one for one in left if one.slow and _part(ranks, one)]
        what = {1: "nic", 2: "link"}.get(len(ranks), "group")
        factor = median(one.ratio for one in explained)
        suspects.append(Suspect(what=what, ranks=ranks, factor=factor, seen=len(explained)))
        left = [one for one in left if one not in explained]
    return suspects


def _blamed(left: Sequence[_Seen]) -> tuple[int, ...]:
    """The rank or the pair that explains most; the whole group of the slowest observation where several would do, or
    none explains more than it contradicts."""
    scores = {candidate: _score(candidate, left) for candidate in _candidates(left)}
    most = max(scores.values())
    tied = [candidate for candidate, score in scores.items() if score == most]
    pairs = [candidate for candidate in tied if len(candidate) == 2] or tied  # of both ends and the link: the link
    if most > 0 and len(pairs) == 1:
        return pairs[0]
    return tuple(sorted(max((one for one in left if one.slow), key=lambda one: one.ratio).ranks))


def _observations(found: Sequence[Rebuilt], above: float) -> list[_Seen]:
    """Messages by pair and collectives by group, each against the median of its like elsewhere."""
    took: dict[tuple, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        target = _targets(one)
        for task, seconds in zip(one.tasks, one.seconds.tolist()):
            if task.queue == "compute":
                continue
            if task.kind == "send":
                if task.number in target:
                    took["send", task.queue, task.key][task.ranks[0], target[task.number]].append(seconds)
            elif len(task.ranks) > 1:
                took[task.kind, task.queue, task.key, len(task.ranks)][tuple(sorted(task.ranks))].append(seconds)
    out = []
    for what, by_ranks in took.items():
        middle = {ranks: median(values) for ranks, values in by_ranks.items()}
        for ranks, own in middle.items():
            others = [seconds for other, seconds in middle.items() if other != ranks]
            if others and median(others) > 0:
                ratio = own / median(others)
                out.append(_Seen(ranks, ratio, ratio > 1 + above, what[0] == "send"))
    return out


def _targets(one: Rebuilt) -> dict[int, int]:
    """The rank that every message is for: that of the pass of the next stage."""
    lanes = [rank.lane for rank in one.timeline.ranks]
    home = {}
    for task in one.tasks:
        for letter in PASSES.get(task.kind, "").split():
            home.setdefault((letter, lanes[task.ranks[0]], task.stage, task.microbatch), task.ranks[0])
    out = {}
    for task in one.tasks:
        if task.kind == "send" and task.queue in ("pp_forward", "pp_backward"):
            forward = task.queue == "pp_forward"
            where = (
                "F" if forward else "B",
                lanes[task.ranks[0]],
                task.stage + (1 if forward else -1),
                task.microbatch,
            )
            if where in home:
                out[task.number] = home[where]
    return out


def _candidates(left: Iterable[_Seen]) -> set[tuple[int, ...]]:
    """Whoever may be to blame: the ranks of slow observations, and the pairs that slow messages are between or that
    are neighbours in a slow ring."""
    out: set[tuple[int, ...]] = set()
    for one in left:
        if one.slow:
            out |= {(rank,) for rank in one.ranks}
            out |= {tuple(sorted(pair)) for pair in _pairs(one)}
    return out


def _pairs(one: _Seen) -> list[tuple[int, int]]:
    """The pairs that a message, or a ring over a group, goes between."""
    if one.message or len(one.ranks) == 2:
        return [(one.ranks[0], one.ranks[1])]
    return list(zip(one.ranks, (*one.ranks[1:], one.ranks[0])))


def _part(candidate: tuple[int, ...], one: _Seen) -> bool:
    """Whether a rank, a pair or a whole group is part of an observation."""
    if len(candidate) == 1:
        return candidate[0] in one.ranks
    if len(candidate) > 2:
        return tuple(sorted(one.ranks)) == candidate
    return any(tuple(sorted(pair)) == candidate for pair in _pairs(one))


def _score(candidate: tuple[int, ...], left: Iterable[_Seen]) -> int:
    """Slow observations that a candidate is part of, less those that are not slow."""
    return sum(1 if one.slow else -1 for one in left if _part(candidate, one))


# -- waiting


def _waits(found: Sequence[Rebuilt], count: int) -> NDArray[np.float64]:
    """[source, target]: seconds of the mean step that the target was ready for a collective before the last member, or
    for a pass before the message from another rank was there."""
    out = np.zeros((count, count))
    for one in found:
        free: dict[tuple[int, str], float] = {}
        for task in one.tasks:
            ready = {rank: free.get((rank, task.queue), 0.0) for rank in task.ranks}
            needs: list[Task] = [one.tasks[number] for number in task.needs]
            for need in needs:
                for rank in task.ranks:
                    if rank in need.ranks:
                        ready[rank] = max(ready[rank], need.end_s)
            for need in needs:
                if need.kind == "send" and need.ranks[0] not in task.ranks:
                    out[need.ranks[0], task.ranks[0]] += max(0.0, need.end_s - ready[task.ranks[0]])
            last = max(ready, key=ready.__getitem__)
            for rank, at_s in ready.items():
                out[last, rank] += ready[last] - at_s
                free[rank, task.queue] = task.end_s
    return out / max(len(found), 1)


# -- ranks that hang


def _hung(every: Sequence[Step], timeline: Timeline) -> tuple[list[Suspect], list[Step]]:
    """Find where the last step hangs, if it is not whole; and the steps that are whole."""
    if len(every) < 2 or every[-1].timeline.num_spans >= every[-2].timeline.num_spans:
        return [], list(every)
    plan = plan_of(timeline)
    before, last = (rebuild(step.timeline, plan) for step in every[-2:])
    done = set(_numbered(last))
    keys = _numbered(before)
    missing = [task for task, key in zip(before.tasks, keys) if key not in done]
    left = {task.number for task in missing}
    previous: dict[tuple[int, str], int] = {}
    frontier = []
    for task in before.tasks:
        waits = task.needs | {previous[rank, task.queue] for rank in task.ranks if (rank, task.queue) in previous}
        if task.number in left and not waits & left:
            frontier.append(task)
        for rank in task.ranks:
            previous[rank, task.queue] = task.number
    own = [task for task in frontier if len(task.ranks) == 1] or frontier
    ranks = dict.fromkeys(task.ranks for task in own)
    factor = float("inf")
    return [Suspect(what="hung", ranks=r, factor=factor, seen=len(missing)) for r in ranks], list(every[:-1])


def _numbered(one: Rebuilt) -> list[tuple]:
    """A key for every task that is the same in other steps."""
    seen: dict[tuple, int] = defaultdict(int)
    out = []
    for t in one.tasks:
        key = (t.ranks, t.kind, t.queue, t.stage, t.chunk, t.microbatch, t.layer)
        out.append((*key, seen[key]))
        seen[key] += 1
    return out
