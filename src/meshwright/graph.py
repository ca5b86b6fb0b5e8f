"""The task graph: what a plan lowers to, as flat arrays.

A *task* occupies one or more *streams* (a rank class and one of its queues) for a duration that is looked
up by its cost key. Streams run in order, so program order is part of the graph; explicit edges carry the
rest. Tasks are stored in topological order: every edge without lag points backwards. That makes the timing
a single forward pass (``simulate/engine.py``) and makes a deadlock visible here, when the graph is built,
not while it runs.

Durations are not in the graph. ``cost_key[i]`` indexes a table of durations beside it, so a draw of
lengths, stragglers or costs re-times the same graph.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from meshwright.errors import MeshwrightError

#: What a task does. F, B, W, BW are passes over (part of) a model chunk; the rest name what is moved or done.
KINDS: tuple[str, ...] = (
    "F",
    "B",
    "W",
    "BW",
    "recompute",
    "send",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ring",
    "optimizer",
    "host",
    "op",
    "copy",
    "neighbours",
)
KIND = {name: index for index, name in enumerate(KINDS)}
#: Queues a rank has. ``compute`` runs kernels; the others carry one kind of traffic each, in order: ``outer`` what
#: replicas average and apply in a later step; ``h2d`` and ``d2h`` copies between device and host, ``nvme`` those
#: between host and drives, in both directions. ``host`` is what the host's processor computes.
QUEUES: tuple[str, ...] = (
    "compute",
    "tp",
    "cp",
    "ep",
    "dp",
    "dp_gather",
    "pp_forward",
    "pp_backward",
    "copy",
    "host",
    "link_forward",
    "link_backward",
    "outer",
    "h2d",
    "d2h",
    "nvme",
)
QUEUE = {name: index for index, name in enumerate(QUEUES)}
#: Per-task attribute columns, -1 where one does not apply.
ATTRIBUTES: tuple[str, ...] = ("stage", "chunk", "microbatch", "layer", "step")


#: A value that ranks have in common which pass each other activations.
Lane = tuple[int, tuple[tuple[str, int], ...], str]


class RankClass(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks that do the same work at the same times, or one real rank of these.

    ``pool`` is the plan's pool that they belong to ("" for the only one), ``stage`` their place in its pipeline,
    ``slice`` the kind of data-parallel slices that they are of (-1 where all are alike), ``device`` what they run on
    and ``multiplicity`` how many real ranks they are. ``at`` says which real rank of a class this is, as (axis, place);
    () for a whole class. ``label`` is the name of what is no part of a plan, such as a layer's operators.
    """

    pool: str = ""
    slice: int = -1
    stage: int = 0
    device: str = ""
    multiplicity: int = 1
    at: tuple[tuple[str, int], ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The name for people: ``slice 0 rank 1 (h100_sxm)``, ``rank 1 dp0 tp1``."""
        if self.label:
            return self.label
        words = [self.pool] if self.pool else []
        words += [f"slice {self.slice}"] if self.slice >= 0 else []
        words += [f"rank {self.stage}", *(f"{axis}{place}" for axis, place in self.at)]
        return " ".join(words + ([f"({self.device})"] if self.slice >= 0 and self.device else []))

    @property
    def lane(self) -> Lane:
        """The pipeline that the ranks are of: all but their place in it."""
        return self.slice, self.at, self.label

    def stands_for(self, rank: RankClass) -> bool:
        """Whether `rank` is one of these, as far as both say where they are."""
        return (
            (self.pool, self.stage, self.label) == (rank.pool, rank.stage, rank.label)
            and self.slice in (-1, rank.slice)
            and set(self.at) <= set(rank.at)
        )


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """The streams of a graph: ``rank[s]`` is an index into ``ranks``, ``queue[s]`` one into :data:`QUEUES`."""

    rank: NDArray[np.int32]
    queue: NDArray[np.int32]
    ranks: tuple[RankClass, ...]

    @property
    def multiplicity(self) -> tuple[int, ...]:
        """The number of real ranks that each rank class stands for."""
        return tuple(rank.multiplicity for rank in self.ranks)

    def __len__(self) -> int:
        return len(self.rank)


class MemoryEvents(msgspec.Struct, frozen=True, kw_only=True):
    """State allocated (positive bytes) or freed (negative) when a task starts or ends; what is freed comes first, so
    that a stable sort by time replays frees before allocations of the same instant.

    Columns of equal length: ``task``, ``rank`` (class), ``at_end`` (bool), ``num_bytes`` and ``category``
    (index into ``categories``).
    """

    task: NDArray[np.int32]
    rank: NDArray[np.int32]
    at_end: NDArray[np.bool_]
    num_bytes: NDArray[np.float64]
    category: NDArray[np.int32]
    categories: tuple[str, ...]


class TaskGraph(msgspec.Struct, frozen=True, kw_only=True):
    """``num_tasks`` tasks in topological order.

    ``kind`` [N] indexes :data:`KINDS`; ``member``/``member_ptr`` are the streams task i occupies (CSR);
    ``dep``/``dep_ptr`` the tasks it waits for (CSR), ``dep_lag`` the lag of each edge in steps;
    ``cost_key`` [N] indexes ``keys``; ``attributes`` is an int32 array [5, N] in the order of
    :data:`ATTRIBUTES`.
    """

    streams: Streams
    kind: NDArray[np.uint8]
    member_ptr: NDArray[np.int32]
    member: NDArray[np.int32]
    dep_ptr: NDArray[np.int32]
    dep: NDArray[np.int32]
    dep_lag: NDArray[np.int32]
    cost_key: NDArray[np.int32]
    keys: tuple[str, ...]
    attributes: NDArray[np.int32]
    memory: MemoryEvents | None = None

    @property
    def num_tasks(self) -> int:
        return len(self.kind)

    @property
    def has_lag(self) -> bool:
        return bool(self.dep_lag.any())

    def attribute(self, name: str) -> NDArray[np.int32]:
        """One attribute column [N], -1 where it does not apply."""
        return self.attributes[ATTRIBUTES.index(name)]

    def digest(self) -> str:
        """A hash of everything that decides the timing but the durations: equal graphs, equal digests."""
        h = hashlib.sha256()
        for array in (self.kind, self.member_ptr, self.member, self.dep_ptr, self.dep, self.dep_lag, self.cost_key):
            h.update(np.ascontiguousarray(array).tobytes())
        h.update(np.ascontiguousarray(self.attributes).tobytes())
        h.update("\0".join(self.keys).encode())
        return h.hexdigest()[:16]

    def text(self) -> str:
        """One line a task: ``12 F compute@0 mb3 s0 <- 4 7``. For reading and for golden tests."""
        return "\n".join(self._line(i) for i in range(self.num_tasks))

    def _line(self, i: int) -> str:
        where = ",".join(
            f"{QUEUES[self.streams.queue[s]]}@{self.streams.ranks[self.streams.rank[s]].name}"
            for s in self.member[self.member_ptr[i] : self.member_ptr[i + 1]]
        )
        marks = [
            f"{name}{value}" for name, value in zip(("s", "c", "mb", "l", "t"), self.attributes[:, i]) if value >= 0
        ]
        lo, hi = self.dep_ptr[i], self.dep_ptr[i + 1]
        deps = [f"{d}" + (f"(-{lag})" if lag else "") for d, lag in zip(self.dep[lo:hi], self.dep_lag[lo:hi])]
        arrow = f" <- {' '.join(deps)}" if deps else ""
        return " ".join([str(i), KINDS[self.kind[i]], where, *marks, f"[{self.keys[self.cost_key[i]]}]"]) + arrow


def diff(a: TaskGraph, b: TaskGraph) -> list[str]:
    """The lines in which two graphs differ, ``-`` of `a` and ``+`` of `b`; empty for equal graphs."""
    left, right = a.text().splitlines(), b.text().splitlines()
    return [line for line in difflib.unified_diff(left, right, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]


class GraphBuilder:
    """Collects tasks in program order per stream, in any order across streams, then sorts.

    Columns are given as arrays (``extend``) or one by one (``add``); both append. ``build`` orders the
    tasks topologically and raises G001 naming the tasks of a cycle if the program order of the streams
    and the edges contradict each other (a deadlock).
    """

    def __init__(self, ranks: Sequence[RankClass | str]):
        """`ranks` are rank classes, or labels of what is no part of a plan."""
        self.ranks = tuple(RankClass(label=rank) if isinstance(rank, str) else rank for rank in ranks)
        self._kind: list[NDArray] = []
        self._key: list[NDArray] = []
        self._attr: list[NDArray] = []
        self._members: list[tuple[NDArray, NDArray]] = []  # (task, stream)
        self._edges: list[tuple[NDArray, NDArray, NDArray]] = []  # (task, depends on, lag)
        self._events: list[tuple[NDArray, NDArray, NDArray, NDArray, NDArray]] = []
        self._categories: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._count = 0

    def key(self, name: str) -> int:
        """The index of a cost key, new or known."""
        return self._keys.setdefault(name, len(self._keys))

    def stream(self, rank: int, queue: str) -> int:
        return rank * len(QUEUES) + QUEUE[queue]

    def extend(self, kind, key, *, stream=None, **attributes) -> NDArray[np.int64]:
        """Append n tasks, as many as the arguments that are no scalars say; scalars are spread. Returns their numbers.

        `stream` may be None when members are given through :meth:`occupy`.
        """
        columns = [np.atleast_1d(np.asarray(c)) for c in (kind, key, *attributes.values())]
        if stream is not None:
            stream = np.atleast_1d(np.asarray(stream))
        (n,) = np.broadcast_shapes(*(c.shape for c in columns), *((stream.shape,) if stream is not None else ()))
        ids = np.arange(self._count, self._count + n)
        self._count += n
        attr = np.full((len(ATTRIBUTES), n), -1, np.int32)
        for name, column in zip(attributes, columns[2:]):
            attr[ATTRIBUTES.index(name)] = column
        self._kind.append(_spread(columns[0], n, np.uint8))
        self._key.append(_spread(columns[1], n, np.int32))
        self._attr.append(attr)
        if stream is not None:
            self.occupy(ids, _spread(stream, n, np.int64))
        return ids

    def add(self, kind: str, key: str, streams: int | Iterable[int], after: Iterable[int] = (), **attributes) -> int:
        """Append one task on one or several streams, after the tasks given. Returns its number."""
        task = int(self.extend(KIND[kind], self.key(key), **attributes)[0])
        for s in (streams,) if isinstance(streams, int | np.integer) else streams:
            self.occupy([task], [s])
        for d in after:
            self.depend([task], [d])
        return task

    def occupy(self, tasks, streams) -> None:
        self._members.append((np.asarray(tasks), np.asarray(streams)))

    def depend(self, tasks, on, lag=0) -> None:
        tasks, on = np.atleast_1d(np.asarray(tasks)), np.atleast_1d(np.asarray(on))
        self._edges.append((tasks, on, _spread(lag, len(tasks), np.int64)))

    def memory(self, tasks, rank, at_end: bool, num_bytes, category: str) -> None:
        """Tasks that allocate (bytes > 0) or free (< 0) on a rank class when they start or end."""
        tasks = np.atleast_1d(np.asarray(tasks))
        index = self._categories.setdefault(category, len(self._categories))
        spread = [_spread(c, len(tasks), np.float64) for c in (rank, at_end, num_bytes, index)]
        self._events.append((tasks, *spread))

    def build(self) -> TaskGraph:
        """The graph in topological order.

        Raises:
            MeshwrightError: G001 when stream order and edges form a cycle.
        """
        from meshwright.toposort import topological_order

        n = self._count
        task, stream = (_cat([m[i] for m in self._members], np.int64) for i in (0, 1))
        edge_to, edge_from, lag = (_cat([e[i] for e in self._edges], np.int64) for i in (0, 1, 2))
        member_ptr, (member,) = _csr(task, (stream,), n)
        dep_ptr, (dep, dep_lag) = _csr(edge_to, (edge_from, lag), n)
        order, done = topological_order(member_ptr, member, dep_ptr, dep, dep_lag, len(self.ranks) * len(QUEUES))
        attributes = np.concatenate(self._attr, axis=1) if self._attr else np.empty((len(ATTRIBUTES), 0), np.int32)
        kind, key = _cat(self._kind, np.uint8), _cat(self._key, np.int32)
        keys = tuple(self._keys)
        if done < n:
            _refuse_cycle(order, done, n, kind, attributes)
        position = np.empty(n, np.int64)
        position[order] = np.arange(n)
        used = np.flatnonzero(np.bincount(member, minlength=len(self.ranks) * len(QUEUES)))
        renumber = np.zeros(len(self.ranks) * len(QUEUES), np.int32)
        renumber[used] = np.arange(len(used))
        streams = Streams(
            rank=(used // len(QUEUES)).astype(np.int32),
            queue=(used % len(QUEUES)).astype(np.int32),
            ranks=self.ranks,
        )
        new_member_ptr, at = _reorder(member_ptr, order)
        new_member = renumber[member[at]]
        new_dep_ptr, at = _reorder(dep_ptr, order)
        new_dep, new_lag = position[dep[at]].astype(np.int32), dep_lag[at]
        return TaskGraph(
            streams=streams,
            kind=kind[order],
            member_ptr=new_member_ptr,
            member=new_member,
            dep_ptr=new_dep_ptr,
            dep=new_dep,
            dep_lag=new_lag,
            cost_key=key[order],
            keys=keys,
            attributes=np.ascontiguousarray(attributes[:, order]),
            memory=self._memory(position),
        )

    def _memory(self, position: NDArray[np.int64]) -> MemoryEvents | None:
        if not self._events:
            return None
        events = sorted(self._events, key=lambda e: float(e[3].max(initial=0.0)) > 0)
        task, rank, at_end, num_bytes, category = (_cat([e[i] for e in events], np.float64) for i in range(5))
        return MemoryEvents(
            task=position[task.astype(np.int64)].astype(np.int32),
            rank=rank.astype(np.int32),
            at_end=at_end.astype(np.bool_),
            num_bytes=num_bytes,
            category=category.astype(np.int32),
            categories=tuple(self._categories),
        )


def _cat(parts: list, dtype) -> NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


def _spread(values: ArrayLike, n: int, kind: DTypeLike) -> NDArray:
    """An array [n] of a type, of as many values or of one: an assignment, which numpy does faster than its views."""
    out = np.empty(n, kind)
    out[:] = values
    return out


def _csr(row: NDArray, values: tuple[NDArray, ...], num_rows: int) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
    """Rows and columns of values as (pointer, columns), the values of one row in the order given."""
    by_row = np.argsort(row, kind="stable")
    pointer = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(row, minlength=num_rows), out=pointer[1:])
    return pointer, [value[by_row].astype(np.int32) for value in values]


def _reorder(pointer: NDArray, order: NDArray) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The pointer of a CSR whose rows are put in another order, and where its values come from."""
    width = np.diff(pointer)[order]
    new = np.zeros(len(pointer), np.int32)
    np.cumsum(width, out=new[1:])
    return new, np.arange(new[-1]) + np.repeat(pointer[:-1][order] - new[:-1], width)


def _refuse_cycle(order: NDArray, done: int, n: int, kind: NDArray, attributes: NDArray) -> None:
    stuck = np.setdiff1d(np.arange(n), order[:done])[:6]
    named = ", ".join(f"{KINDS[kind[i]]}(stage {attributes[0, i]}, microbatch {attributes[2, i]})" for i in stuck)
    raise MeshwrightError.one(
        "G001",
        f"deadlock: {n - done} of {n} tasks can never start",
        place=f"first of them: {named}",
        help="the order on some stream asks for a task before the task it depends on; check the schedule's order",
    )
