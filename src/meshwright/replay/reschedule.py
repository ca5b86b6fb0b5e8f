"""The same measured passes in the order of another pipeline schedule.

Every pass keeps the time it took on its lane and stage (the mean over microbatches; the first forward and the last
backward of a stage, beside which parameters and gradients are exchanged, their own), messages theirs between the same
ranks. Exchanges begin at the same point of the last backward, and what follows the passes follows them. Stages cut
anew take the time of the layers they hold (:mod:`meshwright.replay.shares`). The optimizer stays where it was.

What was not measured is not made up: a schedule that splits the backward needs a trace with split backwards, or the
share of the weight gradients said; one that holds every stage twice has an exchange of weights that others lack.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright import schedules
from meshwright.graph import Lane
from meshwright.replay.pass_times import NAMES, PassTimes, cannot, measured, resampled
from meshwright.replay.shares import fractions, profiles, shares
from meshwright.replay.tasks import Rebuilt, Task
from meshwright.schedules.actions import BW, Actions, F, W


class Lanes(msgspec.Struct, frozen=True):
    """``rank[lane][p]`` is the rank at place p of a lane's pipeline."""

    rank: dict[Lane, list[int]]

    @property
    def num_ranks(self) -> int:
        return len(next(iter(self.rank.values())))


class StageExchange(msgspec.Struct):
    """An exchange of a stage: how much of its pass has run when it begins (or, a gather, is needed), its task, and the
    ranks that hold the stage now."""

    at: float
    task: Task
    stage: int
    ranks: tuple[int, ...]


def reschedule(rebuilt: Rebuilt, name: str, *, vpp: int | None = None, weight_share: float | None = None) -> Rebuilt:
    """The tasks in the order of the schedule `name` with `vpp` stages a rank (default: as many as there were, or what
    the schedule has). `weight_share` is the part of a backward that its weight gradients take, for traces that do not
    split it.

    Raises:
        MeshwrightError: S codes when the schedule is not legal for these ranks and microbatches; X107 when the trace
            does not say what the schedule needs.
    """
    lanes = _lanes(rebuilt)
    old = _placement(rebuilt, lanes)
    count = max((t.microbatch for t in rebuilt.tasks if t.is_pass), default=-1) + 1
    actions = _actions(name, lanes.num_ranks, count, len(old) // max(lanes.num_ranks, 1), vpp)
    _possible(rebuilt, actions, old)
    layers = profiles(rebuilt, len(old), fractions(rebuilt))
    share = shares(layers, actions.num_stages)
    found = {lane: measured(rebuilt, ranks) for lane, ranks in lanes.rank.items()}
    times = {lane: resampled(p, share, weight_share, actions) for lane, p in found.items()}
    return _Builder(rebuilt, lanes, actions, times, layers).all()


def _lanes(rebuilt: Rebuilt) -> Lanes:
    found: dict[Lane, dict[int, int]] = defaultdict(dict)
    for rank, known in enumerate(rebuilt.timeline.ranks):
        found[known.lane][known.stage] = rank
    size = max(map(len, found.values()))
    if size < 2:
        cannot("it has no pipeline", "a schedule orders the passes of pipeline stages: trace a plan with pp above 1")
    if any(sorted(ranks) != list(range(size)) for ranks in found.values()):
        cannot("ranks are missing in it", "trace all ranks")
    return Lanes({lane: [ranks[p] for p in range(size)] for lane, ranks in found.items()})


def _placement(rebuilt: Rebuilt, lanes: Lanes) -> list[tuple[int, ...]]:
    """The places that hold each stage."""
    at = {rank: p for ranks in lanes.rank.values() for p, rank in enumerate(ranks)}
    found: dict[int, set[int]] = defaultdict(set)
    for task in rebuilt.tasks:
        if task.is_pass:
            found[task.stage].add(at[task.ranks[0]])
    if sorted(found) != list(range(len(found))):
        cannot("stages are missing in it", "trace all ranks")
    return [tuple(sorted(found[s])) for s in range(len(found))]


def _actions(name: str, pp: int, count: int, had: int, vpp: int | None) -> Actions:
    family = schedules.get(name)
    if vpp is None and not family.legality(pp, count, had):
        vpp = had
    return schedules.build(name, pp, count, vpp)


def _possible(rebuilt: Rebuilt, actions: Actions, old: list[tuple[int, ...]]) -> None:
    if rebuilt.direct:
        cannot("the output's error went to all stages at once in it", "trace a plan without feedback=")
    if (max(map(len, old)) > 1) != (max(map(len, actions.stage_ranks)) > 1):
        cannot(
            "the number of ranks that hold a stage changes, and with it an exchange of weights nobody measured",
            "trace a schedule that runs the pipeline in both directions too, or in one",
        )
    gathers = {(t.stage, t.microbatch) for t in rebuilt.tasks if t.queue == "dp_gather" and t.microbatch >= 0}
    if len({s for s, _ in gathers}) < len(gathers):
        cannot("parameters are gathered for every microbatch in it", "trace a plan that gathers once a step")


class _Builder:
    """The tasks of the new order."""

    def __init__(
        self,
        rebuilt: Rebuilt,
        lanes: Lanes,
        actions: Actions,
        times: dict[Lane, PassTimes],
        layers: list[NDArray[np.float64]],
    ):
        self.r, self.lanes, self.actions, self.times, self.layers = rebuilt, lanes, actions, times, layers
        self.tasks: list[Task] = []
        self.seconds: list[float] = []
        self.wait: list[float] = []
        self.first: dict[tuple, int] = {}  # (letter, lane, stage, microbatch) -> number
        self.last: dict[tuple, int] = {}
        self.following: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.new_number: dict[int, int] = {}
        self.stage_scale = actions.num_stages / len(layers)
        self.lane_of = {rank: lane for lane, ranks in lanes.rank.items() for rank in ranks}
        self.gathers, self.reduces = self._exchanges()

    def all(self) -> Rebuilt:
        waiting: list[tuple[int, StageExchange]] = []
        for lane, ranks in self.lanes.rank.items():
            for p, rank in enumerate(ranks):
                waiting += self._program(lane, p, rank)
        self._sends()
        self._exchange(waiting)
        self._rest()
        return msgspec.structs.replace(
            self.r, tasks=tuple(self.tasks), seconds=np.array(self.seconds), wait_s=np.array(self.wait)
        )

    def _add(self, task: Task, seconds: float, wait: float = 0.0) -> int:
        task.number = len(self.tasks)
        self.tasks.append(task)
        self.seconds.append(seconds)
        self.wait.append(wait)
        return task.number

    def _exchanges(
        self,
    ) -> tuple[dict[tuple[Lane, int], list[StageExchange]], dict[tuple[Lane, int], list[StageExchange]]]:
        """Gathers and reductions of every (lane, new stage), with where in the pass they belong."""
        fraction = fractions(self.r)
        gathers: dict[tuple[Lane, int], list[StageExchange]] = defaultdict(list)
        reduces: dict[tuple[Lane, int], list[StageExchange]] = defaultdict(list)
        needed = {n: t for t in self.r.tasks if t.is_pass for n in t.needs}
        for task in self.r.tasks:
            if task.stage < 0 or task.queue not in ("dp", "dp_gather"):
                continue
            for rank in task.ranks:
                lane = self.lane_of[rank]
                if task.queue == "dp_gather" and task.number in needed:
                    begin = fraction[needed[task.number].number][0]
                    stage, at = self._moved(task.stage, begin)
                    gathers[lane, stage].append(StageExchange(at, task, stage, self._holders(stage, task)))
                elif task.queue == "dp" and rank not in self.r.late:
                    makers = [n for n in task.needs if self._makes(n, task, rank)]
                    if makers:
                        end = fraction[max(makers)][1]
                        stage, at = self._moved(task.stage, 1 - end)
                        reduces[lane, stage].append(StageExchange(1 - at, task, stage, self._holders(stage, task)))
        return gathers, reduces

    def _holders(self, stage: int, task: Task) -> tuple[int, ...]:
        """The ranks that exchange a stage: on every lane the one that holds it, or, of two, the one that did."""
        places = self.actions.stage_ranks[stage]
        if len(places) > 1:
            return task.ranks
        return tuple(self.lanes.rank[self.lane_of[rank]][places[0]] for rank in task.ranks)

    def _makes(self, number: int, task: Task, rank: int) -> bool:
        maker = self.r.tasks[number]
        return maker.kind in ("BW", "W") and maker.stage == task.stage and rank in maker.ranks

    def _moved(self, stage: int, begin: float) -> tuple[int, float]:
        """The new stage that holds the layers from where this share of an old stage's time has passed, in forward
        order, and the share of the new one."""
        if self.stage_scale == 1:
            return stage, begin
        layers = self.layers[stage]
        passed = np.concatenate([[0.0], np.cumsum(layers)])
        at = (stage + float(np.interp(begin, passed, np.linspace(0, 1, len(passed))))) * self.stage_scale
        new = min(int(np.floor(at + 1e-6)), self.actions.num_stages - 1)
        return new, min(max(at - new, 0.0), 1.0)

    def _program(self, lane: Lane, p: int, rank: int) -> list[tuple[int, StageExchange]]:
        """One rank's passes in order, cut where exchanges hang on them; (piece's number, exchange) of each."""
        a = self.actions
        mine = range(int(a.rank_ptr[p]), int(a.rank_ptr[p + 1]))
        grads = {int(a.stage[j]): j for j in mine if a.kind[j] in (W, BW)}
        first: dict[int, int] = {}
        for j in mine:
            if a.kind[j] == F:
                first.setdefault(int(a.stage[j]), j)
        waiting, before, times = [], -1, self.times[lane]
        for j in mine:
            kind, stage, microbatch = NAMES[int(a.kind[j])], int(a.stage[j]), int(a.microbatch[j])
            hung: list[StageExchange] = []
            if first.get(stage) == j and a.kind[j] == F:
                hung = self.gathers[lane, stage]
            elif grads.get(stage) == j:
                hung = self.reduces[lane, stage]
            hung = [h for h in hung if rank in h.ranks]
            whole = (times.edge if hung else times.usual)[kind, stage]
            cuts = sorted({0.0, 1.0, *(round(h.at, 12) for h in hung)})
            for begin, end in pairwise(cuts):
                task = Task(
                    number=0,
                    kind=kind,
                    queue="compute",
                    stage=stage,
                    chunk=stage // self.lanes.num_ranks,
                    microbatch=microbatch,
                    layer=-1,
                    ranks=(rank,),
                    spans=[],
                    start_s=0.0,
                    end_s=0.0,
                    key=kind,
                )
                number = self._add(task, whole * (end - begin), times.wait[kind] if begin == 0 else 0.0)
                if before >= 0:
                    self.following[before] = number
                before = number
                for letter in {"F": "F", "B": "B", "BW": "B", "W": "W"}[kind]:
                    self.first.setdefault((letter, lane, stage, microbatch), number)
                    self.last[letter, lane, stage, microbatch] = number
                if kind == "F":
                    waiting += [(number, h) for h in hung if round(h.at, 12) == begin]
                else:
                    waiting += [(number, h) for h in hung if round(h.at, 12) == end]
        self.done[rank] = before
        return waiting

    def _sends(self) -> None:
        """Messages in the order in which their passes run."""
        ways = self._ways()
        for (letter, lane, stage, microbatch), made_by in sorted(self.last.items(), key=lambda item: item[1]):
            target = stage + {"F": 1, "B": -1, "W": 0}[letter]
            following = self.first.get((letter, lane, target, microbatch))
            if letter == "W" or following is None:
                continue
            source, into = (self.tasks[n].ranks[0] for n in (made_by, following))
            need = made_by
            if source != into:
                queue = "pp_forward" if letter == "F" else "pp_backward"
                send = Task(
                    number=0,
                    kind="send",
                    queue=queue,
                    stage=stage,
                    chunk=-1,
                    microbatch=microbatch,
                    layer=-1,
                    ranks=(source,),
                    spans=[],
                    start_s=0.0,
                    end_s=0.0,
                    key="send",
                    needs={made_by},
                )
                need = self._add(send, _way(ways, queue, source, into))
                if self.r.blocking and made_by in self.following:
                    self._need(self.following[made_by], need)
            self._need(following, need)

    def _need(self, number: int, on: int) -> None:
        self.tasks[number].needs = self.tasks[number].needs | {on}

    def _ways(self) -> dict[tuple, list[float]]:
        """Seconds of the messages measured, by queue and ranks, and by queue alone."""
        runs: dict[tuple, int] = {}
        for task in self.r.tasks:
            for letter in {"F": "F", "B": "B", "BW": "B"}.get(task.kind, ""):
                runs[letter, self.lane_of[task.ranks[0]], task.stage, task.microbatch] = task.ranks[0]
        out: dict[tuple, list[float]] = defaultdict(list)
        for task, seconds in zip(self.r.tasks, self.r.seconds.tolist()):
            if task.kind == "send" and task.queue in ("pp_forward", "pp_backward"):
                letter, ahead = ("F", 1) if task.queue == "pp_forward" else ("B", -1)
                into = runs.get((letter, self.lane_of[task.ranks[0]], task.stage + ahead, task.microbatch), -1)
                for key in ((task.ranks[0], into), (task.queue,), ()):
                    out[key].append(seconds)
        if not out:
            cannot("it has no messages between stages", "trace a plan with pp above 1")
        return out

    def _exchange(self, waiting: list[tuple[int, StageExchange]]) -> None:
        """Exchanges in program order: each once, after (or, a gather, before) the pieces of all its members."""
        for number, piece in waiting:
            old = piece.task
            if old.number not in self.new_number:
                fresh = msgspec.structs.replace(old, needs=set(), spans=[], stage=piece.stage, ranks=piece.ranks)
                self.new_number[old.number] = self._add(fresh, float(self.r.seconds[old.number]))
            new = self.new_number[old.number]
            if old.queue == "dp":
                self._need(new, number)
            else:
                self._need(number, new)

    def _rest(self) -> None:
        """Add the tasks that are neither passes nor messages as they were, those that followed a pass behind the last
        pass of each rank."""
        for task in self.r.tasks:
            if task.is_pass or task.kind == "send" or task.number in self.new_number:
                continue
            needs = set()
            for n in task.needs:
                before = self.r.tasks[n]
                if before.is_pass or before.kind == "send":
                    needs |= {self.done[r] for r in before.ranks}
                elif n in self.new_number:
                    needs.add(self.new_number[n])
            if task.queue == "dp" and task.stage < 0:
                needs |= {self.done[r] for r in task.ranks}
            fresh = msgspec.structs.replace(task, needs=needs, spans=[])
            i = task.number
            self.new_number[i] = self._add(fresh, float(self.r.seconds[i]), float(self.r.wait_s[i]))


def _way(ways: dict[tuple, list[float]], queue: str, source: int, into: int) -> float:
    """Seconds of a message between two ranks: the mean of those measured, else of those on its queue, else of all."""
    for key in ((source, into), (queue,)):
        if key in ways:
            return fmean(ways[key])
    return fmean(ways[()])
