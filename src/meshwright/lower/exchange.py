"""Exchanges between data-parallel ranks: parameters gathered before their use, gradients reduced once final.

Gradients are reduced segment by segment as the last backward releases them (or after every microbatch when they
are sharded), parameters gathered before they are used. Collectives join the slice classes they span, so the
slowest slice holds the others up, as it does in reality.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.compute import Compute
from meshwright.lower.facts import Facts
from meshwright.lower.roles import CodeRole, ExchangeRole, Roles
from meshwright.lower.units import Unit
from meshwright.schedules.actions import BW, Actions, B, F
from meshwright.sync.due import due_after, first_of, rounds
from meshwright.sync.fragments import AGAIN, FOLDED, GATHERED, GRADIENTS, STEP

#: A sharded parameter's gathered copy is prefetched at most this many layers ahead, as FSDP limits it.
PREFETCH = 2


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """The reductions of a step: their tasks, the pipeline rank of each, and the layers it scatters; ``gathers``: the
    tasks that gather parameters. ``reduced_for`` and ``gathered_for`` are the positions of the computation that each
    is for, of every class of slices."""

    task: np.ndarray = np.empty(0, np.int64)
    rank: np.ndarray = np.empty(0, np.int64)
    units: tuple[tuple[Unit, ...], ...] = ()
    gathers: np.ndarray = np.empty(0, np.int64)
    reduced_for: tuple[np.ndarray, ...] = ()
    gathered_for: tuple[np.ndarray, ...] = ()


def add_exchanges(
    builder: GraphBuilder, roles: Roles, facts: Facts, orders: list[Actions], computes: list[Compute]
) -> Reduced:
    """Add all gathers and reductions of the step; return the reductions."""
    if not facts.exchanges:
        return Reduced(gathered_for=tuple(np.empty(0, np.int64) for _ in computes))
    exchanger = _Exchanger(builder, roles, facts, orders, computes)
    gathered = exchanger.gather_ahead()
    reduced = Reduced() if facts.frozen else exchanger.reduce()
    if not facts.overlap_dp and len(gathered[0]) and len(reduced.task):
        exchanger.in_turn(*gathered, reduced)
    return msgspec.structs.replace(reduced, gathers=gathered[0], gathered_for=gathered[1])


class _Exchanger:
    """Adds the exchanges of one step to a builder."""

    def __init__(
        self, builder: GraphBuilder, roles: Roles, facts: Facts, orders: list[Actions], computes: list[Compute]
    ):
        self.builder, self.roles, self.facts = builder, roles, facts
        self.orders, self.actions, self.computes = orders, orders[0], computes
        self.rank_of = self.actions.rank_of()

    def gather_ahead(self) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Parameters gathered before the passes that use them: the tasks, and the positions that they are for."""
        facts = self.facts
        if facts.zero == 0 or not facts.gathers_ahead:
            return np.empty(0, np.int64), tuple(np.empty(0, np.int64) for _ in self.computes)
        kinds = (F, B, BW) if facts.again else (F,)
        chosen = [np.isin(actions.kind, kinds) for actions in self.orders]
        if not facts.again:
            chosen = [first_of(actions, among) for actions, among in zip(self.orders, chosen)]
        places = self._places(chosen)
        at = places[0]
        # a second copy of weights among neighbours is there once the forward has gathered them
        near = facts.copied & np.isin(self.actions.kind[self.computes[0].action[at]], (B, BW))
        whats = (GATHERED, AGAIN) if facts.copied else (GATHERED,)
        gathers = self._collective("all_gather", at, whats, "dp_gather", near.astype(np.int64))
        for compute, mine in zip(self.computes, places):
            self.builder.depend(compute.task[mine], gathers)
        ahead = PREFETCH if facts.overlap_dp else 1
        if facts.again and len(at) > ahead:
            rank = self.rank_of[self.computes[0].action[at]]
            same = rank[ahead:] == rank[:-ahead]
            for compute in self.computes:
                self.builder.depend(gathers[ahead:][same], compute.task[at][:-ahead][same])
        return gathers, tuple(places)

    def reduce(self) -> Reduced:
        """Gradients reduced as they become final, or after every round where they are sharded."""
        facts, computes = self.facts, self.computes
        places = self._places([due_after(actions, facts.due) for actions in self.orders])
        at, rank = places[0], self.rank_of[computes[0].action]
        open_ = not facts.overlap_dp
        after = [
            compute.done[rank[at]] if open_ and not facts.scatters else compute.task[mine]
            for compute, mine in zip(computes, places)
        ]
        if facts.encoded:
            after = self._encode(at, after)
        whats = (GRADIENTS,)
        if facts.scoped and not open_:  # a layer's sum goes on once its last pass is in it
            whats = (GRADIENTS, f"{GRADIENTS}+{FOLDED}")
        last = self._places([due_after(actions, STEP) for actions in self.orders])[0]
        reduces = self._collective("reduce_scatter", at, whats, "dp", np.isin(at, last) * (len(whats) - 1))
        for tasks in after:
            self.builder.depend(reduces, tasks)
        if facts.scatters and open_:
            goes_on = np.flatnonzero(rank[at] == np.append(rank[1:], -1)[at])
            for compute in computes:
                self.builder.depend(compute.task[at[goes_on] + 1], reduces[goes_on])
        elif facts.scatters and facts.pp > 1:
            self._wait_for_room(at, reduces)
        return Reduced(
            task=reduces,
            rank=rank[at],
            units=tuple(units for _, units in self._exchanged(at)),
            reduced_for=tuple(places),
        )

    def in_turn(self, gathers: np.ndarray, places: tuple[np.ndarray, ...], reduced: Reduced) -> None:
        """Nothing runs beside anything: the gather in front of a pass is issued once the reduction of the passes
        before it is over, as calls that return when they are done have it."""
        at = places[0]
        before = np.searchsorted(reduced.reduced_for[0], at) - 1
        rank = self.rank_of[self.computes[0].action[at]]
        some = np.flatnonzero(before >= 0)
        some = some[reduced.rank[before[some]] == rank[some]]
        for mine, reduced_for in zip(places, reduced.reduced_for):  # slices of other lengths may have another order
            some = some[reduced_for[before[some]] < mine[some]]
        self.builder.depend(gathers[some], reduced.task[before[some]])

    def _encode(self, at: np.ndarray, after: list[np.ndarray]) -> list[np.ndarray]:
        """Gradients are encoded before they travel, beside the computation; the tasks of each class of slices."""
        pp, found = self.facts.pp, []
        distinct, back = self._distinct(at)
        coded = np.array([not all(u.plain for u in units) for _, units in distinct])[back]
        rank = np.array([r for r, _ in distinct], np.int64)[back][coded]
        for index, tasks in enumerate(after):
            roles = [self.roles(CodeRole("encode", u, index, 0 if self.facts.alike else r)) for r, u in distinct]
            streams = np.array([self.builder.stream(index * pp + r, "copy") for r in range(pp)])
            ids = self.builder.extend(KIND["optimizer"], np.array(roles, np.int64)[back][coded], stream=streams[rank])
            self.builder.depend(ids, tasks[coded])
            ready = np.array(tasks)
            ready[coded] = ids
            found.append(ready)
        return found

    def _wait_for_room(self, at: np.ndarray, reduces: np.ndarray) -> None:
        """A round starts when the one before the last is scattered: a rank has two stages' gradients whole at most."""
        begins = np.flatnonzero(rounds(self.actions)[0])
        rank = self.rank_of[begins]
        last = reduces[np.append(np.flatnonzero(np.diff(self.computes[0].action[at])), len(at) - 1)]  # of every round
        later = np.flatnonzero(rank[2:] == rank[:-2])
        for compute in self.computes:
            first = compute.task[np.searchsorted(compute.action, begins)]
            self.builder.depend(first[2:][later], last[:-2][later])

    def _places(self, chosen: list[np.ndarray]) -> list[np.ndarray]:
        """Positions in every ``compute.task`` of the tasks of the chosen actions, those that exchange with each other
        at one place. Slices with other numbers of microbatches have the same exchanges, of every (rank, stage)."""
        places = [np.flatnonzero(mask[compute.action]) for mask, compute in zip(chosen, self.computes)]
        if len(set(self.facts.counts)) == 1:
            return places
        out = []
        for actions, compute, at in zip(self.orders, self.computes, places):
            what = compute.action[at]
            out.append(at[np.lexsort((compute.segment[at], actions.stage[what], actions.rank_of()[what]))])
        back = np.argsort(out[0])  # in the first slices' own order
        return [at[back] for at in out]

    def _exchanged(self, at: np.ndarray) -> list[tuple[int, tuple[Unit, ...]]]:
        """Return for each task at these positions its pipeline rank and the layers that it computes with."""
        distinct, back = self._distinct(at)
        return [distinct[i] for i in back.tolist()]

    def _distinct(self, at: np.ndarray) -> tuple[list[tuple[int, tuple[Unit, ...]]], np.ndarray]:
        compute, facts = self.computes[0], self.facts
        action = compute.action[at]
        whole = np.bincount(compute.action)[action] == 1
        segment = np.where(whole, -1, compute.segment[at])
        place = self.actions.stage[action] * facts.pp + self.rank_of[action].astype(np.int64)
        distinct, back = np.unique(place * 100_000 + segment + 1, return_inverse=True)
        out = []
        for value in distinct.tolist():
            place, seg = divmod(value, 100_000)
            composition = facts.compositions[place // facts.pp]
            out.append((place % facts.pp, composition.units if seg == 0 else composition.segments[seg - 1]))
        return out, back

    def _collective(
        self, kind: str, at: np.ndarray, whats: tuple[str, ...], queue: str, which: np.ndarray
    ) -> np.ndarray:
        """Add collectives at these positions, each of what `which` says of `whats`."""
        first, pp = self.computes[0], self.facts.pp
        action = first.action[at]
        distinct, back = self._distinct(at)
        pairs, back = np.unique(which * len(distinct) + back.reshape(-1), return_inverse=True)
        numbers = []
        for what, place in (divmod(pair, len(distinct)) for pair in pairs.tolist()):
            r, units = distinct[place]
            numbers.append(self.roles(ExchangeRole(whats[what], units, 0 if self.facts.alike else r)))
        ids = self.builder.extend(
            KIND[kind],
            np.array(numbers, np.int64)[back.reshape(-1)],
            stage=self.actions.stage[action],
            microbatch=self.actions.microbatch[action],
            layer=first.segment[at],
        )
        for index in range(len(self.computes)):
            streams = np.array([self.builder.stream(index * pp + r, queue) for r in range(pp)])
            self.builder.occupy(ids, streams[self.rank_of[action]])
        return ids
