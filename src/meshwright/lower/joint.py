"""Several pools as one graph: the structure of each, joined by what flows over their links.

A pool takes the sequences of a step in *waves*: microbatch m of all its replicas is wave m, the sequences from
``m * dp * mb`` on. Pools of other replicas or microbatches have other waves, so a message is what two waves share: the
target's forward waits for all source waves that its own needs, and the source's backward for the gradients of all
target waves that it is part of.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.graph import KIND, QUEUES, GraphBuilder, TaskGraph
from meshwright.lower.facts import Facts
from meshwright.lower.roles import LinkRole, NormRole, Role, Roles
from meshwright.lower.structure import REMEMBERED, Structure, hold, structure
from meshwright.lower.waves import shared

#: Messages that a target has room for ahead of the one it works on, as the executor's channels have.
AHEAD = 2
#: Activations that were made and not taken yet, at both ends of a link.
BETWEEN = "activations between pools"
#: Tasks that are added to those of the pools' own graphs have roles of no pool.
NO_POOL = -1


class Crossing(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A link between two pools, by their numbers. ``waves`` are the sequences of a wave of each; ``back``: gradients
    flow back."""

    source: int
    target: int
    waves: tuple[int, int]
    back: bool


class JointFacts(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """All that the structure of a step of several pools depends on."""

    pools: tuple[Facts, ...]
    crossings: tuple[Crossing, ...]


class Joint(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of a step of several pools with roles for cost keys; ``owners`` [roles] are the pools they are of, -1
    for links and the norm. ``codes`` number the bytes of memory events: the entries of each pool's structure, one after
    the other, then for every one of ``carried`` (crossing, sequences) what a rank of the source and of the target holds
    of such a message, as it appears and as it goes."""

    facts: JointFacts
    structures: tuple[Structure, ...]
    graph: TaskGraph
    roles: tuple[Role, ...]
    owners: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]
    codes: NDArray[np.int64]


class _Passes(NamedTuple):
    """First and last task of the passes of one stage on one class of slices, [microbatch] each, and the rank class."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    rank: NDArray[np.int64]


@lru_cache(maxsize=REMEMBERED)
def joint(facts: JointFacts) -> Joint:
    """The structure of every step of pools with these facts.

    Raises:
        MeshwrightError: G001 when the schedules wait for one another, G002 when a rule of the graph is broken.
    """
    return _Joiner(facts).joined()


class _Joiner:
    """Puts the pools' graphs into one builder and adds what joins them."""

    def __init__(self, facts: JointFacts):
        self.facts = facts
        self.structures = tuple(structure(one) for one in facts.pools)
        widths = [len(one.facts.counts) * one.facts.pp for one in self.structures]
        self.classes = np.cumsum([0, *widths])
        self.builder = GraphBuilder(tuple(map(str, range(sum(widths)))))
        self.roles: list[Role] = []
        self.owners: list[int] = []
        self.links = Roles()
        self.ids: list[NDArray[np.int64]] = []
        self.norm: list[tuple[NDArray[np.int64], list[int]]] = []  # (streams, tasks before), a pool each
        self.behind: list[int] = []  # tasks after the norm
        self.carried: dict[tuple[int, int], int] = {}

    def joined(self) -> Joint:
        """The joint structure."""
        for pool in range(len(self.structures)):
            self._add(pool)
        self._add_norm()
        crossing = [self._forward(number, one) for number, one in enumerate(self.facts.crossings)]
        for number, one in enumerate(self.facts.crossings):
            if one.back:
                self._backward(number, one)
        self._remember(crossing)
        graph = self.builder.build()
        hold(graph, "that joins the pools", forward_only=any(one.frozen for one in self.facts.pools))
        codes = np.abs(graph.memory.num_bytes).astype(np.int64) - 1 if graph.memory is not None else np.empty(0, int)
        roles = [*self.roles, *self.links.number]
        return Joint(
            facts=self.facts,
            structures=self.structures,
            graph=graph,
            roles=tuple(roles),
            owners=(*self.owners, *[NO_POOL] * len(self.links.number)),
            carried=tuple(self.carried),
            codes=codes,
        )

    def _add(self, pool: int) -> None:
        """The tasks of one pool, but for its norm, which joins all pools."""
        own = self.structures[pool]
        graph, base = own.graph, int(self.classes[pool])
        norm = np.array([isinstance(role, NormRole) for role in own.roles])[graph.cost_key]
        kept = np.flatnonzero(~norm)
        ids = np.full(graph.num_tasks, -1, np.int64)
        names = ("stage", "chunk", "microbatch", "layer")
        ids[kept] = self.builder.extend(
            graph.kind[kept],
            graph.cost_key[kept] + len(self.roles),
            **{name: graph.attribute(name)[kept] for name in names},
        )
        self.ids.append(ids)
        self.roles += own.roles
        self.owners += [pool] * len(own.roles)
        streams = (graph.streams.rank.astype(np.int64) + base) * len(QUEUES) + graph.streams.queue
        task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
        mine = ~norm[task]
        self.builder.occupy(ids[task[mine]], streams[graph.member[mine]])
        after = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
        plain = ~norm[after] & ~norm[graph.dep]
        self.builder.depend(ids[after[plain]], ids[graph.dep[plain]], graph.dep_lag[plain])
        if norm.any():
            behind = after[norm[graph.dep]]
            self.norm.append((streams[graph.member[~mine]], [*ids[graph.dep[norm[after]]].tolist()]))
            self.behind += ids[behind].tolist()
        self._add_memory(pool, ids)

    def _add_memory(self, pool: int, ids: NDArray[np.int64]) -> None:
        memory = self.structures[pool].graph.memory
        if memory is None:
            return
        base = sum(len(one.sizes) for one in self.structures[:pool])
        codes = np.sign(memory.num_bytes) * (np.abs(memory.num_bytes) + base)
        for category, name in enumerate(memory.categories):
            for at_end in (False, True):
                some = (memory.category == category) & (memory.at_end == at_end)
                for sign in (-1, 1):
                    chosen = np.flatnonzero(some & (np.sign(codes) == sign))
                    if len(chosen):
                        ranks = memory.rank[chosen] + self.classes[pool]
                        self.builder.memory(ids[memory.task[chosen]], ranks, at_end, codes[chosen], name)

    def _add_norm(self) -> None:
        """One gradient norm over all pools that are trained: nobody updates before the slowest has its gradients."""
        self.roles.append(NormRole(0))
        self.owners.append(NO_POOL)
        (norm,) = self.builder.extend(KIND["all_reduce"], len(self.roles) - 1)
        for streams, before in self.norm:
            self.builder.occupy(np.full(len(streams), norm), streams)
            self.builder.depend(np.full(len(before), norm), before)
        self.builder.depend(self.behind, np.full(len(self.behind), norm))

    def _passes(self, pool: int, stage: int, kinds: tuple[str, ...], index: int) -> _Passes:
        """The passes of a stage of a pool on one class of slices."""
        own = self.structures[pool]
        graph, pp, count = own.graph, own.facts.pp, own.facts.counts[index]
        rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
        chosen = np.isin(graph.kind, [KIND[kind] for kind in kinds]) & (graph.attribute("stage") == stage)
        at = np.flatnonzero(chosen & (rank // pp == index))
        microbatch = graph.attribute("microbatch")[at]
        first, last = np.full(count, graph.num_tasks), np.full(count, -1)
        np.minimum.at(first, microbatch, at)
        np.maximum.at(last, microbatch, at)
        ids = self.ids[pool]
        return _Passes(ids[first], ids[last], rank[last] + self.classes[pool])

    def _ends(self, one: Crossing, kinds: tuple[str, ...]) -> tuple[list[_Passes], list[_Passes]]:
        """The passes at both ends of a link: the last stage of the source and the first of the target, for every class
        of slices."""
        pools = self.facts.pools
        last = len(pools[one.source].compositions) - 1
        source = [self._passes(one.source, last, kinds, i) for i in range(len(pools[one.source].counts))]
        return source, [self._passes(one.target, 0, kinds, i) for i in range(len(pools[one.target].counts))]

    def _pairs(self, one: Crossing) -> Iterator[tuple[int, int, int]]:
        """Waves of source and target that share sequences, and how many."""
        counts = self.facts.pools[one.source].counts[0], self.facts.pools[one.target].counts[0]
        return shared(one.waves, counts)

    def _send(self, number: int, index: int, sequences: int, back: bool, rank: int, microbatch: int) -> int:
        """A message from a rank class, of so many sequences of a link."""
        role = self.links(LinkRole(link=number, slice=index, sequences=sequences, back=back))
        stream = self.builder.stream(rank, "link_backward" if back else "link_forward")
        key = len(self.roles) + role
        return int(self.builder.extend(KIND["send"], key, stream=[stream], microbatch=microbatch)[0])

    def _forward(self, number: int, one: Crossing) -> list[tuple[int, ...]]:
        """Activations, in the order in which they are made: (link, sequences, send, source pass, source class, target
        pass, target class, ...) each."""
        source, target = self._ends(one, ("F",))
        out = []
        for index, passes in enumerate(source):
            for m, k, sequences in sorted(self._pairs(one), key=lambda pair: (passes.last[pair[0]], pair[1])):
                send = self._send(number, index, sequences, False, int(passes.rank[m]), m)
                self.builder.depend([send], [passes.last[m]])
                ends = []
                for theirs in target:
                    self.builder.depend([theirs.first[k]], [send])
                    if k >= AHEAD:
                        self.builder.depend([send], [theirs.last[k - AHEAD]])
                    ends += [int(theirs.first[k]), int(theirs.rank[k])]
                out.append((number, sequences, send, int(passes.last[m]), int(passes.rank[m]), *ends))
        return out

    def _backward(self, number: int, one: Crossing) -> None:
        """Add the messages of received activations' gradients back to the source, in the order they are made."""
        source, target = self._ends(one, ("B", "BW"))
        for index, passes in enumerate(target):
            for m, k, sequences in sorted(self._pairs(one), key=lambda pair: (passes.last[pair[1]], pair[0])):
                send = self._send(number, index, sequences, True, int(passes.rank[k]), k)
                self.builder.depend([send], [passes.last[k]])
                for theirs in source:
                    self.builder.depend([theirs.first[m]], [send])

    def _remember(self, crossing: list[list[tuple[int, ...]]]) -> None:
        """Bytes of messages: at the source from the pass that made them until they are sent, at the target from then
        until the pass that takes them begins."""
        base = sum(len(one.sizes) for one in self.structures)
        for number, sequences, send, made, rank, *ends in (one for link in crossing for one in link):
            entry = base + 4 * self.carried.setdefault((number, sequences), len(self.carried)) + 1
            self.builder.memory(made, rank, True, entry, BETWEEN)
            self.builder.memory(send, rank, True, -(entry + 1), BETWEEN)
            for taken, where in zip(ends[::2], ends[1::2]):
                self.builder.memory(send, where, False, entry + 2, BETWEEN)
                self.builder.memory(taken, where, False, -(entry + 3), BETWEEN)
