"""Rounds: the level above the step, of replicas that exchange what they changed once in several steps.

Steps of a round differ in what is due: nothing, a part of the layers that is sent, one that is applied. Each kind is
timed once, as the step's graph with the other tasks left out. Where a result is applied at once a round is the sum of
these. Where it is applied `lag` steps later (the lagged edge from an exchange to what applies it), exchanges go on
beside the steps: a pipeline rank's queue of them is carried from step to step through several rounds, until a round is
as the one before, and a step that needs what has not arrived stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.cost.roofline import contention
from meshwright.graph import QUEUE, TaskGraph
from meshwright.lower import Lowered
from meshwright.lower.program import Program
from meshwright.simulate import clock
from meshwright.simulate.engine import Times, makespans
from meshwright.simulate.price import Priced
from meshwright.simulate.ticking import meetings_a_step
from meshwright.sync.fragments import HOPS, NEIGHBOURS
from meshwright.sync.rounds import due_at

#: Rounds after which a round's time is taken not to change any more: what is in flight is as old as one at most.
SETTLED = 3


class PartTimes(NamedTuple):
    """A part of the layers that is due together. ``sends_s`` and ``applies_s`` are seconds of the step that sends it
    and of the one that applies it, one step where `lag` is 0; ``ends_s`` and ``busy_s`` [exchange queues] when its
    exchange is done after that step's beginning, and how long it takes; ``waits_s`` seconds that the step which applies
    it waits for it; ``num_bytes`` the most that a rank sends of it."""

    sends_s: float
    applies_s: float
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    num_bytes: float
    waits_s: float = 0.0


class Round(NamedTuple):
    """Steps of replicas that exchange in ``every`` of them each of their ``parts`` once, and apply it ``lag`` steps
    later: seconds of an ``inner`` step in which nothing is due. ``slows_s`` are seconds that a round's exchanges take
    from the kernels beside them, and ``exchanges`` how many times as long as one of each part they take. ``causes``
    [num_keys, causes] and (start, end) are of an inner step's tasks, ``sent`` [num_keys, causes] those of the step that
    sends the part which takes longest."""

    every: float
    lag: int
    inner_s: float
    parts: tuple[PartTimes, ...]
    slows_s: float
    causes: np.ndarray
    times: Times
    sent: np.ndarray
    exchanges: float = 1.0

    @property
    def averaging_s(self) -> float:
        """Seconds of a step that exchanges, with those that it makes others take longer, in the mean over parts."""
        if not self.lag:
            sends_s = sum(p.sends_s for p in self.parts) / len(self.parts)
            return self.inner_s + (sends_s - self.inner_s) * self.exchanges
        extra = sum(p.sends_s + p.applies_s - 2 * self.inner_s + p.waits_s for p in self.parts) + self.slows_s
        return self.inner_s + extra / len(self.parts)

    @property
    def waits_s(self) -> float:
        """Seconds of a round that steps wait for what has not arrived."""
        return sum(p.waits_s for p in self.parts)

    @property
    def mean_s(self) -> float:
        """Seconds of a step, over a round."""
        return self.inner_s + (self.averaging_s - self.inner_s) * len(self.parts) / self.every

    @property
    def hidden_bytes_per_s(self) -> float:
        """The bytes a second of a rank's link at which no step waits for what is applied later: each part is through
        before it is due, and all of a round's within a round."""
        late = max(part.num_bytes for part in self.parts) / self.lag
        return max(late, sum(part.num_bytes for part in self.parts) / self.every) / self.inner_s

    def run_s(self, num_steps: int) -> float:
        """Return the seconds from a start to the end of so many steps: nothing is on its way at first, and what still
        is at the end is not waited for. Without a lag every step counts as the mean of a round."""
        if not self.lag:
            return num_steps * self.mean_s
        *_, (now, _) = carried(self.parts, int(self.every), self.lag, self.inner_s, num_steps)
        return now + self.slows_s * num_steps / self.every

    def over(self, inner, averaging):
        """Return the mean of a figure over the steps of a round, from an inner step's and those of one that exchanges
        a part once."""
        return inner + (averaging - inner) * self.exchanges * len(self.parts) / self.every


class Only(NamedTuple):
    """A lowered plan and its prices in which of the tasks of a round these alone are left."""

    lowered: Lowered
    priced: Priced

    def times(self, costs: Costs) -> Times:
        return clock.times(self.lowered, self.priced, costs)


def only(lowered: Lowered, priced: Priced, which: Callable[[Program], bool]) -> Only:
    """Leave out what is due once in several steps, but for these."""
    stays = np.array([not program.rare or which(program) for program in lowered.programs])
    programs = tuple(
        program if stay else msgspec.structs.replace(program, kind="exchange", moves=(), work=None, products=())
        for program, stay in zip(lowered.programs, stays.tolist())
    )
    kept = msgspec.structs.replace(priced, parts=priced.parts * stays[:, None], wait=priced.wait * stays)
    return Only(msgspec.structs.replace(lowered, programs=programs), kept)


def round_of(lowered: Lowered, priced: Priced, costs: Costs, whole: Times) -> tuple[Round, Times]:
    """The round of a plan whose replicas step apart, and the times of the step that sends the part which takes
    longest, with what goes on beside later ones cut where it ends. `whole` are the times of a step in which all is
    due."""
    due = [program for program in lowered.programs if program.rare]
    every, lag = due[0].every, max(program.lag for program in due)
    inner = only(lowered, priced, lambda program: False)
    plain = inner.times(costs)
    inner_s = float(plain[1].max())
    found: list[tuple[PartTimes, Times, np.ndarray]] = []
    numbers = sorted({program.part for program in due})
    for part in numbers:
        known = whole if len(numbers) == 1 and not lag else None
        found.append(_part(lowered, priced, costs, part, lag, inner_s, known))
    parts = tuple(part for part, _, _ in found)
    slowest = max(range(len(parts)), key=lambda i: parts[i].sends_s + parts[i].applies_s)
    slows = 0.0
    if lag:
        parts = tuple(p._replace(waits_s=w) for p, w in zip(parts, waits(parts, every, lag, inner_s)))
        hidden = max(0.0, sum(max(p.busy_s) for p in parts) - sum(p.waits_s for p in parts))
        slows = min(hidden, every * inner_s) * contention(lowered.mesh.cluster.islands[0].device)
    exchanges = 1.0
    if any(program.clocked for program in due):
        exchanges = meetings_a_step(lowered, costs, inner_s, parts[0].sends_s - inner_s)
    _, times, sent = found[slowest]
    return Round(every, lag, inner_s, parts, slows, inner.priced.parts, plain, sent, exchanges), times


def _part(
    lowered: Lowered, priced: Priced, costs: Costs, number: int, lag: int, inner_s: float, known: Times | None
) -> tuple[PartTimes, Times, np.ndarray]:
    """A part, the times of the step that sends it, where they are not `known`, and the causes of its tasks."""
    mine = [program for program in lowered.programs if program.rare and program.part == number]
    num_bytes = _most_bytes(lowered.graph, lowered.programs, number)
    if not lag:
        alone = only(lowered, priced, lambda program: program.part == number)
        start, end = known or alone.times(costs)
        return PartTimes(float(end.max()), inner_s, (), (), num_bytes), (start, end), alone.priced.parts
    sends = only(lowered, priced, lambda program: program.part == number and not program.applies)
    start, end = sends.times(costs)
    beside = _beside(lowered.graph)
    whole = float(end[~beside].max())
    ends, busy = [], []
    for tasks in exchange_queues(lowered.graph):
        at = [t for t in tasks if lowered.programs[lowered.graph.cost_key[t]].part == number]
        if at:
            ends.append(float(end[at].max()))
            busy.append(float((end[at] - start[at]).sum()))
    applies_s = inner_s
    if any(program.applies for program in mine):
        after = only(lowered, priced, lambda program: program.part == number and program.applies)
        applies_s = float(after.times(costs)[1].max())
    shown = np.minimum(start, whole), np.minimum(end, whole)
    return PartTimes(whole, applies_s, tuple(ends), tuple(busy), num_bytes), shown, sends.priced.parts


def waits(parts: tuple[PartTimes, ...], every: int, lag: int, inner_s: float) -> list[float]:
    """Return the seconds that the step which applies each part waits for it, once rounds are alike.

    A queue that has more to carry than fits in a round falls behind by a little in each: long before a step waits for
    it, if that comes many steps later. In the end a round is as long as what the queue carries in it, and the last part
    is waited for by what is missing.
    """
    *_, (_, found) = carried(parts, every, lag, inner_s, SETTLED * every + lag)
    round_s = every * inner_s + sum(w + p.sends_s + p.applies_s - 2 * inner_s for p, w in zip(parts, found))
    carried_s = max((sum(some) for some in zip_longest(*(p.busy_s for p in parts), fillvalue=0.0)), default=0.0)
    found[-1] += max(0.0, carried_s - round_s)
    return found


def carried(
    parts: tuple[PartTimes, ...], every: int, lag: int, inner_s: float, num_steps: int
) -> Iterator[tuple[float, list[float]]]:
    """Yield, for each of the steps from a start on, when it ends and the seconds that the step which last applied each
    part waited for it (one list, which goes on).

    A queue carries parts in the order in which they are sent. A part that is sent while it is free is done when its own
    step's graph says; else its exchange follows the one before.
    """
    due = [due_at(part, len(parts), every) for part in range(len(parts))]
    ends: dict[tuple[int, int], float] = {}
    free = [0.0] * max(len(p.busy_s) for p in parts)
    now, found = 0.0, [0.0] * len(parts)
    for step in range(1, num_steps + 1):
        begin, longer = now, 0.0
        for number, part in enumerate(parts):  # one after the other at a step's end
            if step % every == due[number] % every:
                for queue, (end, busy) in enumerate(zip(part.ends_s, part.busy_s)):
                    free[queue] = max(begin + end + longer, free[queue] + busy)
                ends[number, step] = max(free[: len(part.ends_s)], default=0.0)
                longer += part.sends_s - inner_s
            sent = step - lag
            if sent > 0 and sent % every == due[number] % every:
                found[number] = max(0.0, ends[number, sent] - (begin + inner_s + longer))
                longer += found[number] + part.applies_s - inner_s
        now = begin + inner_s + longer
        yield now, found


def exchange_queues(graph: TaskGraph) -> Iterator[list[int]]:
    """Yield the tasks of each queue that carries what is applied steps later."""
    streams = graph.streams
    for stream in np.flatnonzero(streams.queue == QUEUE["outer"]).tolist():
        at = np.flatnonzero(graph.member == stream)
        yield (np.searchsorted(graph.member_ptr, at, side="right") - 1).tolist()


def _beside(graph: TaskGraph) -> np.ndarray:
    """Whether each task [N] is of such a queue."""
    return graph.streams.queue[graph.member[graph.member_ptr[:-1]]] == QUEUE["outer"]


def _most_bytes(graph: TaskGraph, programs: tuple[Program, ...], number: int) -> float:
    """The most bytes that a rank sends of a part: in a ring, as good as all that it brings and receives once each."""
    sent: dict[int, float] = {}
    for task in range(graph.num_tasks):
        program = programs[graph.cost_key[task]]
        if not program.rare or program.part != number:
            continue
        rank = int(graph.streams.rank[graph.member[graph.member_ptr[task]]])
        sent[rank] = sent.get(rank, 0.0) + sum(_sent(move) for move in program.moves)
    return max(sent.values(), default=0.0)


def _sent(move) -> float:
    """Bytes that a rank sends of a collective by a ring: its own share to all others, twice where it is a sum."""
    if move.op == NEIGHBOURS:
        return move.num_bytes * move.group.fan
    if move.op == HOPS:
        return move.num_bytes * (move.group.size - 1)
    others = (move.group.size - 1) / move.group.size
    return move.num_bytes * others * (2 if move.op == "all_reduce" else 1)


def drawn(run_graph: TaskGraph, programs: tuple[Program, ...], one: Round, durations: np.ndarray) -> np.ndarray:
    """Return the mean step times under durations [draws, keys]. What is in flight is drawn with the steps beside it."""
    often = np.array([not program.rare for program in programs])
    part = np.array([program.part for program in programs])
    applies = np.array([program.applies for program in programs])
    moves = np.array([bool(program.moves) for program in programs])

    def spans(stays: np.ndarray) -> np.ndarray:
        return makespans(run_graph, np.ascontiguousarray(durations * (often | stays)))

    inner = spans(np.zeros(len(programs), bool))
    if not one.lag:
        extra = sum(spans(part == number) - inner for number in range(len(one.parts)))
        return inner + extra * one.exchanges / one.every
    beside = _beside(run_graph)
    exchanged = np.bincount(run_graph.cost_key[beside], minlength=len(programs))
    out = []
    sends = [spans((part == n) & ~applies & ~moves) for n in range(len(one.parts))]
    taken = [spans((part == n) & applies) for n in range(len(one.parts))]
    for draw in range(len(durations)):
        parts = []
        for n, p in enumerate(one.parts):
            nominal = durations[0] * exchanged * (part == n)
            mine = durations[draw] * exchanged * (part == n)
            longer = mine.sum() / nominal.sum() if nominal.sum() else 1.0
            before = sends[n][draw] / sends[n][0]
            ends = tuple((e - b) * before + b * longer for e, b in zip(p.ends_s, p.busy_s))
            busy = tuple(b * longer for b in p.busy_s)
            parts.append(p._replace(sends_s=sends[n][draw], applies_s=taken[n][draw], ends_s=ends, busy_s=busy))
        late = waits(tuple(parts), one.every, one.lag, inner[draw])
        parts = tuple(p._replace(waits_s=w) for p, w in zip(parts, late))
        out.append(one._replace(inner_s=inner[draw], parts=parts).mean_s)
    return np.array(out)
