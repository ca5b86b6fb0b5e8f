"""A measured step without stragglers: what it would take if the same work always took the same time.

Every task takes the mean of all that are its like, over ranks and steps, and the graph is timed again: measured over
ideal is the slowdown. With the times of one rank, one stage or one kind of task put back it is theirs (Lin et al.,
"Understanding Stragglers in Large Model Training Using What-if Analysis", 2505.05713). Waits that no task explains are
left out of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.replay.tasks import Rebuilt, Task
from meshwright.replay.timed import timed

Alike = tuple


class Slowdowns(msgspec.Struct, frozen=True, kw_only=True):
    """Slowdowns of a step: ``whole`` is its seconds, without waits that nothing explains, over ``ideal_s``, those
    without stragglers; the others are those with the times of one thing alone put back, by rank (an index into the
    timeline's), stage, data-parallel place and kind of task."""

    step_s: float
    ideal_s: float
    by_rank: dict[int, float]
    by_stage: dict[int, float]
    by_replica: dict[int, float]
    by_kind: dict[str, float]

    @property
    def whole(self) -> float:
        return self.step_s / self.ideal_s


class Ideal:
    """Steps of a job, and each with every task as long as the mean of its like.

    Alike are tasks of one kind, queue, chunk and layer, with as many members and of one number among those of their
    ranks: over stages too, where `stages` are meant to be equal, else over the replicas of a stage.
    """

    def __init__(self, steps: Sequence[Rebuilt], *, stages: bool = True):
        self.steps = [msgspec.structs.replace(one, wait_s=np.zeros_like(one.wait_s)) for one in steps]
        self.stages = stages
        told = [self._passes(one) for one in self.steps]
        found: dict[Alike, list[float]] = defaultdict(list)
        for passes in told:
            for key, seconds in passes.values():
                found[key].append(seconds)
        mean = {key: fmean(values) for key, values in found.items()}
        self.seconds = [self._ideal(one, passes, mean) for one, passes in zip(self.steps, told)]
        self.ideal_s = self._mean(self.seconds)

    def _passes(self, one: Rebuilt) -> dict[int, tuple[Alike, float]]:
        """Of every task before it was cut into pieces, by its first span: what it is alike to, and its seconds."""
        seen: dict[tuple, int] = defaultdict(int)
        out: dict[int, tuple[Alike, float]] = {}
        for task, seconds in zip(one.tasks, one.seconds.tolist()):
            known = out.get(task.spans[0])
            if known is not None:
                out[task.spans[0]] = (known[0], known[1] + seconds)
                continue
            what = (task.kind, task.queue, len(task.ranks), task.chunk, task.layer, -1 if self.stages else task.stage)
            number = seen[task.ranks, what]
            seen[task.ranks, what] += 1
            out[task.spans[0]] = ((*what, number), seconds)
        return out

    @staticmethod
    def _ideal(one: Rebuilt, passes: dict[int, tuple[Alike, float]], mean: dict[Alike, float]) -> NDArray:
        """Seconds of every piece: its share of what the whole task would take."""
        out = np.empty(len(one.tasks))
        for i, task in enumerate(one.tasks):
            key, whole = passes[task.spans[0]]
            out[i] = one.seconds[i] / whole * mean[key] if whole > 0 else mean[key]
        return out

    def _mean(self, seconds: Iterable[NDArray[np.float64]]) -> float:
        return fmean(timed(one, own).makespan_s for one, own in zip(self.steps, seconds))

    def with_own(self, chosen: Callable[[Task], bool]) -> float:
        """Seconds of the mean step in which the chosen tasks alone take as long as they did."""
        return self._mean(
            np.where([chosen(task) for task in one.tasks], one.seconds, ideal)
            for one, ideal in zip(self.steps, self.seconds)
        )

    def slowdowns(self, ranks: Iterable[int]) -> Slowdowns:
        """The slowdowns of the job: those by rank of `ranks` alone."""
        known = self.steps[0].timeline.ranks
        tasks = [task for one in self.steps for task in one.tasks]

        def of(chosen: Callable[[Task], bool]) -> float:
            return self.with_own(chosen) / self.ideal_s

        def among(place: Callable[[int], int]) -> dict[int, float]:
            groups = sorted({place(rank) for rank in range(len(known))})
            return {g: of(lambda t, g=g: any(place(rank) == g for rank in t.ranks)) for g in groups}

        return Slowdowns(
            step_s=self._mean(one.seconds for one in self.steps),
            ideal_s=self.ideal_s,
            by_rank={rank: of(lambda t, rank=rank: rank in t.ranks) for rank in ranks},
            by_stage=among(lambda rank: known[rank].stage),
            by_replica=among(lambda rank: dict(known[rank].at).get("dp", 0)),
            by_kind={
                name: of(lambda t, name=name: _name(t) == name) for name in dict.fromkeys(_name(task) for task in tasks)
            },
        )


def _name(task: Task) -> str:
    return task.kind if task.queue == "compute" else f"{task.kind} {task.queue}"
