"""Tiers: transfers of state between a device, its host's memory and its drives, as tasks beside the computation.

Parameters are fetched ahead of the pass that uses them, into room for ``prefetch`` layers and one, and what is next
used last makes room (Belady's rule: the order of uses is the schedule's, so that it is known). Gradients leave as soon
as they are summed, activations behind their forward, and are back before the backward. Every link is a stream,
in order: ``h2d`` and ``d2h``, the two directions between device and host, and ``nvme`` between host and drives, which
read or write at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.compute import Compute
from meshwright.lower.exchange import Reduced
from meshwright.lower.facts import Facts
from meshwright.lower.roles import HostRole, Roles, TransferRole
from meshwright.lower.units import Unit
from meshwright.plan.facets.offload import DELAYED, NVME
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.sync.due import last_of

#: The link, a stream, that each way of a transfer is on.
LINKS = {"h2d": "h2d", "d2h": "d2h", "nvme_read": "nvme", "nvme_write": "nvme"}
#: A segment of a stage's layers, by both numbers.
Segment = tuple[int, int]


class Misses(NamedTuple):
    """Uses that find their item not there, and for each the use after which its room is free (-1: from the start)."""

    use: np.ndarray
    after: np.ndarray


def next_uses(items: np.ndarray) -> np.ndarray:
    """Return for each use the place of the next one of the same item; the number of uses where there is none."""
    count = len(items)
    out, seen = np.full(count, count), {}
    for place in range(count - 1, -1, -1):
        out[place] = seen.get(int(items[place]), count)
        seen[int(items[place])] = place
    return out


def misses(items: np.ndarray, room: int) -> Misses:
    """Return the uses of `items` that have to be fetched into a store with room for so many, which evicts what is used
    next last: as few as any rule can (Belady, IBM Systems Journal 5, 1966)."""
    upcoming, held, use, after = next_uses(items), {}, [], []
    last_used: dict[int, int] = {}
    for place, item in enumerate(items.tolist()):
        if item not in held:
            free = -1
            if len(held) >= room:
                victim = max(held, key=held.__getitem__)
                free = last_used[victim]
                del held[victim]
            use.append(place)
            after.append(free)
        held[item] = int(upcoming[place])
        last_used[item] = place
    return Misses(np.array(use, np.int64), np.array(after, np.int64))


class Saved(NamedTuple):
    """Activations of one segment in one microbatch that leave the device: tasks that compute them, that have moved
    them, that bring them back (-1: they stay) and that use them, and where."""

    made: np.ndarray
    gone: np.ndarray
    back: np.ndarray
    used: np.ndarray
    segment: np.ndarray
    stage: np.ndarray
    rank: np.ndarray


class Tiered(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers of a step that later passes wait for: tasks that have brought gradients to the host by (slice
    class, pipeline rank) and segment, and the activations that are moved, of each slice class."""

    gradients: dict[tuple[int, int], dict[Segment, int]] = {}
    saved: tuple[Saved, ...] = ()


def add_tiers(
    builder: GraphBuilder,
    roles: Roles,
    facts: Facts,
    orders: list[Actions],
    computes: list[Compute],
    reduced: Reduced,
) -> Tiered:
    """Add the transfers of parameters, activations and gradients."""
    if facts.offload is None:
        return Tiered()
    gradients: dict[tuple[int, int], dict[Segment, int]] = {}
    saved = []
    for index, (actions, compute) in enumerate(zip(orders, computes)):
        mover = Mover(builder, roles, facts, index, actions, compute)
        asked = []
        if facts.offload.params:
            asked.append(mover.parameters(reduced))
        if facts.offload.activations and not facts.frozen:
            asked.append(mover.activations())
        if facts.offload.optimizer and not facts.frozen:
            asked.append(mover.gradients(reduced))
        mover.issue()
        for linked in asked:
            found = linked()
            if isinstance(found, Saved):
                saved.append(found)
            elif found is not None:
                gradients |= found
    return Tiered(gradients=gradients, saved=tuple(saved))


class AskedTransfers(NamedTuple):
    """Transfers of one kind of state, one ``way``, for the segments at some positions of the computation, in order;
    ``tasks`` is filled in once the transfers of all kinds are put in the order of those positions."""

    what: str
    way: str
    at: np.ndarray
    tasks: np.ndarray


class Mover:
    """Adds the transfers of one class of data-parallel slices.

    A link carries transfers of all kinds of state one after the other, in the order in which the computation comes to
    them: each method asks for its own and returns what links them to the computation, once :meth:`issue` has put all
    in order.
    """

    def __init__(
        self, builder: GraphBuilder, roles: Roles, facts: Facts, index: int, actions: Actions, compute: Compute
    ):
        self.builder, self.roles, self.facts, self.index = builder, roles, facts, index
        self.actions, self.compute = actions, compute
        self.kind = actions.kind[compute.action]
        self.stage = actions.stage[compute.action].astype(np.int64)
        self.microbatch = actions.microbatch[compute.action]
        self.rank = actions.rank_of()[compute.action].astype(np.int64)
        self.segment = compute.segment  # that of a stage of one segment, whose passes are one task, is 0
        self.place = self.stage * 100_000 + self.segment
        self.offload, self.room = facts.offload, facts.offload.prefetch + 1
        self.asked: list[AskedTransfers] = []

    def ask(self, what: str, way: str, at: np.ndarray) -> np.ndarray:
        """Ask for transfers of the segments at these positions; the tasks, filled in by :meth:`issue`."""
        self.asked.append(AskedTransfers(what, way, at, np.empty(len(at), np.int64)))
        return self.asked[-1].tasks

    def issue(self) -> None:
        """Add all transfers that were asked for, on each link in the order of their positions."""
        for link in dict.fromkeys(LINKS[one.way] for one in self.asked):
            mine = [one for one in self.asked if LINKS[one.way] == link]
            at = np.concatenate([one.at for one in mine])
            of = np.repeat(np.arange(len(mine)), [len(one.at) for one in mine])
            # what is read ahead goes before what is written until then
            ahead = np.array([self.room * (one.way == "nvme_read") for one in mine])
            order = np.lexsort((of, at - ahead[of]))
            tasks = np.empty(len(at), np.int64)
            tasks[order] = self._added(mine, link, at[order], of[order])
            for number, one in enumerate(mine):
                one.tasks[:] = tasks[of == number]

    def _added(self, mine: list[AskedTransfers], link: str, at: np.ndarray, of: np.ndarray) -> np.ndarray:
        facts = self.facts
        key = (of * facts.pp + self.rank[at]) * 10**12 + self.place[at]
        _, first, back = np.unique(key, return_index=True, return_inverse=True)
        roles = [TransferRole(*mine[of[i]][:2], self._units(at[i]), self.index, self._where(at[i])) for i in first]
        streams = np.array([self.builder.stream(self.index * facts.pp + r, link) for r in range(facts.pp)])
        return self.builder.extend(
            KIND["copy"],
            np.array([self.roles(role) for role in roles], np.int64)[back],
            stream=streams[self.rank[at]],
            stage=self.stage[at],
            microbatch=self.microbatch[at],
            layer=self.segment[at],
        )

    def _units(self, position: int) -> tuple[Unit, ...]:
        return self.facts.compositions[int(self.stage[position])].segments[int(self.segment[position])]

    def _where(self, position: int) -> int:
        return 0 if self.facts.alike else int(self.rank[position])

    def _window(self, tasks: np.ndarray, at: np.ndarray, waited: np.ndarray) -> None:
        """Each of the tasks for these positions waits for what is waited for by the one a window before it, rank by
        rank."""
        for rank in range(self.facts.pp):
            mine = np.flatnonzero(self.rank[at] == rank)
            self.builder.depend(tasks[mine[self.room :]], waited[mine[: -self.room]])

    def parameters(self, reduced: Reduced) -> Callable[[], None]:
        """Fetch parameters ahead of the passes over them, or ahead of the exchange that gathers their shards."""
        gathered = dict(zip(reduced.gathered_for[self.index].tolist(), reduced.gathers.tolist()))
        uses, task = np.flatnonzero(np.isin(self.kind, (F, B, BW))), self.compute.task
        parts = [uses[self.rank[uses] == rank] for rank in range(self.facts.pp)]
        found = [misses(self.place[mine], self.room) for mine in parts]
        at = np.concatenate([mine[one.use] for mine, one in zip(parts, found)])
        fits_after = np.concatenate([np.where(one.after < 0, -1, mine[one.after]) for mine, one in zip(parts, found)])
        fetch, nvme = self.ask("params", "h2d", at), self.offload.params == NVME
        read = self.ask("params", "nvme_read", at) if nvme else fetch

        def linked() -> None:
            waits = fits_after >= 0
            self.builder.depend(fetch[waits], task[fits_after[waits]])
            consumers = [gathered.get(int(p), int(task[p])) for p in at]
            self.builder.depend(np.array(consumers, np.int64), fetch)
            if nvme:
                self.builder.depend(fetch, read)
                self._window(read, at, fetch)

        return linked

    def activations(self) -> Callable[[], Saved]:
        """Move activations behind their forward, and back ahead of their backward, but those that are used again while
        they would be under way. No forward begins while more than a window of them is under way."""
        forward, backward = np.flatnonzero(self.kind == F), np.flatnonzero(np.isin(self.kind, (B, BW)))
        code = self.place * (int(self.microbatch.max()) + 1) + self.microbatch
        of = dict(zip(code[backward].tolist(), backward.tolist()))
        used = np.array([of[int(one)] for one in code[forward]], np.int64)
        moved = [self.offload.moved("activations", len(c.segments)) for c in self.facts.compositions]
        chosen = (self.segment[forward] < np.array(moved)[self.stage[forward]]) & (used - forward > self.room)
        some, task, nvme = np.flatnonzero(chosen), self.compute.task, self.offload.activations == NVME
        at, until = forward[some], used[some]
        out, fetch = self.ask("activations", "d2h", at), self.ask("activations", "h2d", until)
        written = self.ask("activations", "nvme_write", at) if nvme else out
        read = self.ask("activations", "nvme_read", until) if nvme else fetch

        def linked() -> Saved:
            depend, back = self.builder.depend, np.argsort(until, kind="stable")
            depend(out, task[at])
            self._window(task[at], at, out)
            depend(read, written)
            depend(task[until], fetch)
            self._window(fetch[back], until[back], task[until[back]])
            if nvme:
                depend(written, out)
                depend(fetch, read)
                self._window(read[back], until[back], fetch[back])
            gone, came = np.full(len(forward), -1), np.full(len(forward), -1)
            gone[some], came[some] = out, fetch
            where = self.segment[forward], self.stage[forward], self.rank[forward]
            return Saved(task[forward], gone, came, task[used], *where)

        return linked

    def gradients(self, reduced: Reduced) -> Callable[[], dict[tuple[int, int], dict[Segment, int]]]:
        """Move gradients to the host once they are summed: those of every pass where they accumulate there, else the
        last ones. No backward begins while more than a window of those that leave the device is under way."""
        if self.facts.exchanges:
            at, ready = reduced.reduced_for[self.index], reduced.task
        else:
            grads = np.isin(self.actions.kind, (W, BW))
            due = grads if self.offload.grads else last_of(self.actions, grads)
            at = np.flatnonzero(due[self.compute.action])
            ready = self.compute.task[at]
        moved = np.array([self.offload.moved("optimizer", len(c.segments)) for c in self.facts.compositions])
        chosen = self.segment[at] < moved[self.stage[at]]
        if not self.offload.grads:
            chosen &= self._first(at[::-1])[::-1]
        order = np.argsort(at[chosen], kind="stable")
        at, ready = at[chosen][order], ready[chosen][order]
        again, last = np.flatnonzero(~self._first(at)), self._first(at[::-1])[::-1]
        out, nvme = self.ask("grads", "d2h", at), self.offload.grads == NVME
        written = self.ask("grads", "nvme_write", at) if nvme else out

        def linked() -> dict[tuple[int, int], dict[Segment, int]]:
            arrived = out.copy()
            self.builder.depend(out, ready)
            if self.offload.grads:
                self._window(self.compute.task[at], at, out)
            if self.offload.grads and len(again):
                arrived[again] = self._summed(at[again])
                self.builder.depend(arrived[again], out[again])
            if nvme:
                self.builder.depend(written, arrived)
                arrived = written
            found: dict[tuple[int, int], dict[Segment, int]] = {}
            for position, task in zip(at[last].tolist(), arrived[last].tolist()):
                key = self.index, int(self.rank[position])
                found.setdefault(key, {})[int(self.stage[position]), int(self.segment[position])] = task
            return found

        return linked

    def _summed(self, at: np.ndarray) -> np.ndarray:
        """Gradients added to those of earlier microbatches, by the host's processor."""
        _, first, back = np.unique(self.rank[at] * 10**12 + self.place[at], return_index=True, return_inverse=True)
        numbers = [self.roles(HostRole("sum", self._units(at[i]), self.index, self._where(at[i]))) for i in first]
        streams = np.array([self.builder.stream(self.index * self.facts.pp + r, "host") for r in range(self.facts.pp)])
        stream = streams[self.rank[at]]
        return self.builder.extend(KIND["host"], np.array(numbers, np.int64)[back], stream=stream, stage=self.stage[at])

    def _first(self, at: np.ndarray) -> np.ndarray:
        """Whether a position is the first of its rank and segment among those given."""
        out = np.zeros(len(at), bool)
        out[np.unique(self.rank[at] * 10**12 + self.place[at], return_index=True)[1]] = True
        return out


def add_host_updates(
    builder: GraphBuilder,
    roles: Roles,
    facts: Facts,
    held: list[Segment],
    index: int,
    rank: int,
    norm: np.ndarray,
    arrived: dict[Segment, int],
) -> list[np.ndarray]:
    """Add the update of a pipeline rank's segments by its host, one after the other: state read from drives where it
    lies there, a window ahead, updated, written back, and new parameters copied to the device where they lie there.
    Return the last tasks."""
    offload, where = facts.offload, 0 if facts.alike else rank
    room, ends = offload.prefetch + 1, []
    reads: dict[Segment, list[np.ndarray]] = {}
    tiers = {"optimizer": offload.optimizer, "grads": offload.grads, "params": offload.params}
    lag = int(offload.update == DELAYED)  # what an earlier step has brought
    on_drives = [what for what, tier in tiers.items() if tier == NVME]

    def put(
        kind: str, what: str, way: str, at: Segment, after: list[np.ndarray], before: tuple[np.ndarray, ...] = ()
    ) -> np.ndarray:
        units = facts.compositions[at[0]].segments[at[1]]
        role = HostRole(what, units, index, where) if way == "host" else TransferRole(what, way, units, index, where)
        stream = builder.stream(index * facts.pp + rank, LINKS.get(way, way))
        task = builder.extend(KIND[kind], roles(role), stream=[stream], stage=at[0], layer=at[1])
        for one in after:
            builder.depend(task, one)
        for one in before:
            builder.depend(task, one, lag)
        return task

    def read(at: Segment) -> None:
        after = {"optimizer": norm, "grads": np.array([arrived[at]])}
        reads[at] = [put("copy", what, "nvme_read", at, [], (after[what],)) for what in on_drives if what in after]

    for at in held[:room]:
        read(at)
    for number, at in enumerate(held):
        update = put("host", "update", "host", at, reads[at], (norm, np.array([arrived[at]])))
        ends.append(update)
        ends += [put("copy", what, "nvme_write", at, [update]) for what in on_drives if what != "grads"]
        if not offload.params:
            ends.append(put("copy", "weights", "h2d", at, [update]))
        if number + room < len(held):
            read(held[number + room])
    return ends
