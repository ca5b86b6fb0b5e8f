"""Timelines, which both executors return, as columns: task spans, counters, instants, records, and who made them.

A span is one task on one stream of one rank class. Its key (pool, rank, queue, kind, stage, chunk, microbatch, layer,
step, occurrence) is stable, so a simulated and a measured timeline of the same plan can be laid side by side. Spans and
ranks may be missing: a measured timeline of one rank is legal, and so is one of a job over days, which has records and
instants and no spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.dataframe import dataframe
from meshwright.graph import ATTRIBUTES, KIND, KINDS, QUEUES, RankClass, TaskGraph
from meshwright.toposort import binding

if TYPE_CHECKING:
    from pandas import DataFrame

#: Columns of a span's key, in order; equal keys on two timelines of one plan are the same work.
KEY = ("pool", "rank", "queue", "kind", *ATTRIBUTES, "occurrence")
#: A table of records: columns of equal length by name.
Records = dict[str, NDArray]


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The question and who answered it, "" where that is not known: equal identities give equal predictions.

    ``model`` and ``cluster`` are names with digests of what they name, ``graph`` the digest of the task graph,
    ``costs`` the cost profile, ``code`` the version. ``source`` is ``measured`` for what a clock measured.
    """

    code: str = ""
    costs: str = ""
    model: str = ""
    cluster: str = ""
    workload: str = ""
    plan: str = ""
    graph: str = ""
    source: str = "predicted"

    def said(self) -> dict[str, str]:
        """The words that are known, by name; that it was predicted goes without saying."""
        return msgspec.to_builtins(self)


#: The identity of what nobody said anything about.
UNKNOWN = Identity()


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The begin and the end of steps, as columns [steps]: their numbers, and seconds of the timeline's clock."""

    number: NDArray[np.int64] = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    begin_s: NDArray[np.float64] = msgspec.field(default_factory=lambda: np.empty(0))
    end_s: NDArray[np.float64] = msgspec.field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, number: Sequence[int] | NDArray, bounds: Sequence[tuple[float, float]]) -> StepBounds:
        """Build the columns from step numbers and their (begin, end) in seconds."""
        both = np.array(bounds, np.float64).reshape(-1, 2)
        return cls(number=np.array(number, np.int64), begin_s=both[:, 0].copy(), end_s=both[:, 1].copy())


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over time [n] on one rank class (an index into ``ranks``), or of all of them (-1)."""

    name: str
    unit: str
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]
    rank: int = -1


class Instants(msgspec.Struct, frozen=True, kw_only=True):
    """Events without a length, as columns [n] in order of time: ``what`` indexes ``names``, ``rank`` is a rank class or
    -1 for all."""

    names: tuple[str, ...] = ()
    time_s: NDArray[np.float64] = msgspec.field(default_factory=lambda: np.empty(0))
    what: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    rank: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of(cls, events: Sequence[tuple[float, str]]) -> Instants:
        """Build the columns from (seconds, name) of events that concern all ranks."""
        names = {name: place for place, name in enumerate(dict.fromkeys(name for _, name in events))}
        return cls(
            names=tuple(names),
            time_s=np.array([at for at, _ in events], np.float64),
            what=np.array([names[name] for _, name in events], np.int32),
            rank=np.full(len(events), -1, np.int32),
        )


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Allocated bytes of one rank class over time: step function, ``num_bytes[c, i]`` of category c from
    ``time_s[i]`` on. ``static`` categories are constant and included."""

    time_s: NDArray[np.float64]
    categories: tuple[str, ...]
    num_bytes: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        return self.num_bytes.sum(axis=0)

    def peak(self) -> tuple[float, float, dict[str, float]]:
        """(bytes, second, bytes by category) at the highest total."""
        at = int(np.argmax(self.total))
        alive = {c: float(b) for c, b in zip(self.categories, self.num_bytes[:, at])}
        return float(self.total[at]), float(self.time_s[at]), alive


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Spans as columns [S]; ``rank``/``queue`` index ``ranks`` and :data:`QUEUES`; attributes are -1 where
    they do not apply. ``waited_for[i]`` is the span whose end let span i start, -1 for none; ``task`` the
    task of the graph (equal for all members of a collective). ``parts`` splits a duration by cause.

    ``steps`` bounds the steps that spans are of; ``counters`` and ``instants`` are what else happened meanwhile, and
    ``records`` tables of a row for each step, request or event of a job, by name."""

    ranks: tuple[RankClass, ...]
    task: NDArray[np.int32]
    rank: NDArray[np.int32]
    queue: NDArray[np.int32]
    kind: NDArray[np.uint8]
    attributes: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    waited_for: NDArray[np.int32]
    cost_key: NDArray[np.int32]
    keys: tuple[str, ...]
    parts: dict[str, NDArray[np.float64]] = {}
    memory: tuple[MemoryTrace, ...] = ()
    steps: StepBounds = msgspec.field(default_factory=StepBounds)
    counters: tuple[Counter, ...] = ()
    instants: Instants = msgspec.field(default_factory=Instants)
    records: dict[str, Records] = {}
    identity: Identity = UNKNOWN

    @classmethod
    def bare(cls, **said: Any) -> Timeline:
        """Build a timeline without spans: what `said` names, such as counters, instants and records."""
        columns = ("task", "rank", "queue", "start_s", "end_s", "waited_for", "cost_key")
        types = {"start_s": np.float64, "end_s": np.float64}
        return cls(
            **{"ranks": (), "keys": ()} | said,
            **{name: np.empty(0, types.get(name, np.int32)) for name in columns},
            kind=np.empty(0, np.uint8),
            attributes=np.empty((len(ATTRIBUTES), 0), np.int32),
        )

    @property
    def multiplicity(self) -> tuple[int, ...]:
        """The number of real ranks that each rank class stands for."""
        return tuple(rank.multiplicity for rank in self.ranks)

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that the ranks are of, "" for the only one, in the order of the ranks."""
        return tuple(dict.fromkeys(rank.pool for rank in self.ranks))

    def key_columns(self) -> dict[str, NDArray]:
        """The stable key of every span [S], column by column as :data:`KEY` names them: ``pool`` indexes ``pools``, and
        ``occurrence`` counts the spans that are alike in all the rest, in order of start."""
        pools = {name: place for place, name in enumerate(self.pools)}
        pool = np.array([pools[rank.pool] for rank in self.ranks], np.int32)[self.rank]
        columns = dict(zip(KEY, (pool, self.rank, self.queue, self.kind, *self.attributes)))
        order = np.lexsort((self.start_s, *columns.values()))
        same = np.ones(self.num_spans, np.bool_)
        same[:1] = False
        for column in columns.values():
            ordered = column[order]
            same[1:] &= ordered[1:] == ordered[:-1]
        place = np.arange(self.num_spans)
        first = np.maximum.accumulate(np.where(same, 0, place))
        occurrence = np.empty(self.num_spans, np.int32)
        occurrence[order] = place - first
        return columns | {"occurrence": occurrence}

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))

    @property
    def num_spans(self) -> int:
        return len(self.start_s)

    def attribute(self, name: str) -> NDArray[np.int32]:
        return self.attributes[ATTRIBUTES.index(name)]

    def of_rank(self, rank: int, queue: str = "compute") -> NDArray[np.int64]:
        """Spans of one queue of one rank class, in order of start."""
        chosen = np.flatnonzero((self.rank == rank) & (self.queue == QUEUES.index(queue)))
        return chosen[np.argsort(self.start_s[chosen], kind="stable")]

    def critical_path(self) -> NDArray[np.int64]:
        """Spans from the start of the step to its end, each of which started when the one before ended."""
        if not self.num_spans:
            return np.empty(0, np.int64)
        path = [int(np.argmax(self.end_s))]
        while self.waited_for[path[-1]] >= 0:
            path.append(int(self.waited_for[path[-1]]))
        return np.array(path[::-1])

    def busy_s(self, rank: int, queue: str = "compute") -> float:
        chosen = self.of_rank(rank, queue)
        return float((self.end_s[chosen] - self.start_s[chosen]).sum())

    def bubble(self) -> float:
        """Share of the compute queues' time, between a rank's first and last pass, that is idle: (cost - work) / cost,
        cost the longest such span and work the busiest rank's, as pipeline papers define it (Qi et al. 2401.10241,
        section 5). The optimizer, which waits for every rank, is no part of it."""
        spans = [self._active(r) for r in range(len(self.ranks))]
        longest = max((last - first for first, last, _ in spans), default=0.0)
        busy = max((b for _, _, b in spans), default=0.0)
        return 0.0 if longest <= 0 else max(0.0, (longest - busy) / longest)

    def _active(self, rank: int) -> tuple[float, float, float]:
        chosen = self.of_rank(rank)
        chosen = chosen[self.kind[chosen] != KIND["optimizer"]]
        if not len(chosen):
            return 0.0, 0.0, 0.0
        return (
            float(self.start_s[chosen].min()),
            float(self.end_s[chosen].max()),
            float((self.end_s[chosen] - self.start_s[chosen]).sum()),
        )

    def exposed_comm(self, rank: int) -> dict[str, float]:
        """Seconds each communication queue of a rank was busy while its compute queue was idle."""
        compute = self.of_rank(rank)
        out = {}
        for queue in QUEUES[1:]:
            chosen = self.of_rank(rank, queue)
            if len(chosen):
                out[queue] = _outside(
                    self.start_s[chosen], self.end_s[chosen], self.start_s[compute], self.end_s[compute]
                )
        return out

    def peak_memory(self) -> list[float]:
        """Highest total bytes of each rank class."""
        return [m.peak()[0] for m in self.memory]

    def to_dataframe(self, table: str = "") -> DataFrame:
        """One row per span for pandas: its key (the attributes -1 where they do not apply), how many ranks its class
        stands for, start and end in seconds. Or the records of a `table`, such as ``step``, ``request`` or ``event``.

        Raises:
            MeshwrightError: X021 when pandas is not installed.
            KeyError: there are no such records.
        """
        if table:
            return dataframe(self.records[table])
        key = self.key_columns()
        names = {"pool": self.pools, "rank": [r.name for r in self.ranks], "queue": QUEUES, "kind": KINDS}
        return dataframe(
            {
                **key,
                **{column: np.array(words, dtype=object)[key[column]] for column, words in names.items()},
                "multiplicity": np.array(self.multiplicity)[self.rank],
                "start_s": self.start_s,
                "end_s": self.end_s,
            }
        )

    def names(self, spans: NDArray | None = None) -> list[str]:
        """Readable name of spans: ``F mb3 s1``."""
        chosen = range(self.num_spans) if spans is None else spans
        marks = dict(zip(ATTRIBUTES, ("s", "c", "mb", "layer ", "step ")))
        return [
            " ".join(
                [KINDS[self.kind[i]], *(f"{marks[a]}{v}" for a, v in zip(ATTRIBUTES, self.attributes[:, i]) if v >= 0)]
            )
            for i in chosen
        ]


def pack(timeline: Timeline) -> bytes:
    """The timeline as bytes, columns as they lie in memory: how one process hands it to another."""
    return msgspec.msgpack.encode(timeline, enc_hook=_packed)


def unpack(data: bytes) -> Timeline:
    """The timeline that :func:`pack` made `data` of."""
    return msgspec.msgpack.decode(data, type=Timeline, dec_hook=_unpacked)


def _packed(array: NDArray) -> tuple[str, tuple[int, ...], Any]:
    if array.dtype == object:  # texts
        return "", array.shape, array.ravel().tolist()
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def _unpacked(_: type, said: list) -> NDArray:
    dtype, shape, values = said
    flat = np.frombuffer(values, dtype) if dtype else np.array(values, object)
    return flat.reshape(shape)


class Zoom(msgspec.Struct, frozen=True, kw_only=True):
    """One level down: the operators of one layer and pass (``block 0, backward``) on their own timeline."""

    name: str
    timeline: Timeline


def _outside(start: NDArray, end: NDArray, busy_start: NDArray, busy_end: NDArray) -> float:
    """Total length of the intervals [start, end) not covered by the disjoint, sorted busy intervals."""
    if not len(busy_start):
        return float((end - start).sum())
    before = np.concatenate([[0.0], np.cumsum(busy_end - busy_start)])

    def busy_until(time: NDArray) -> NDArray:
        ended = np.searchsorted(busy_end, time, side="right")
        begun = np.minimum(ended, len(busy_start) - 1)
        part = np.where(ended < len(busy_start), np.maximum(time - busy_start[begun], 0.0), 0.0)
        return before[ended] + part

    return max(0.0, float(((end - start) - (busy_until(end) - busy_until(start))).sum()))


def from_times(
    graph: TaskGraph,
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    *,
    parts: dict[str, NDArray[np.float64]] | None = None,
    memory: tuple[MemoryTrace, ...] = (),
    identity: Identity = UNKNOWN,
) -> Timeline:
    """The timeline of a graph whose tasks start and end at the given seconds [N].

    `parts` maps a cause to its seconds per cost key; they sum to the key's duration.
    """
    width = np.diff(graph.member_ptr)
    task = np.repeat(np.arange(graph.num_tasks, dtype=np.int32), width)
    stream = graph.member
    first_span = np.zeros(graph.num_tasks, np.int64)
    first_span[task[::-1]] = np.arange(len(task))[::-1]
    waited_task = binding(graph.member_ptr, graph.member, graph.dep_ptr, graph.dep, graph.dep_lag, start_s, end_s)
    waited = np.where(waited_task >= 0, first_span[np.maximum(waited_task, 0)], -1)
    keys = graph.cost_key[task]
    return Timeline(
        ranks=graph.streams.ranks,
        task=task,
        rank=graph.streams.rank[stream],
        queue=graph.streams.queue[stream],
        kind=graph.kind[task],
        attributes=graph.attributes[:, task],
        start_s=start_s[task],
        end_s=end_s[task],
        waited_for=waited[task].astype(np.int32),
        cost_key=keys,
        keys=graph.keys,
        parts=parts or {},
        memory=memory,
        identity=identity,
    )
