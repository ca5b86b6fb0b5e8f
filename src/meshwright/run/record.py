"""Recording what a process does, span by span, while it trains.

A span is a task with the kind, queue and attributes that it has in a simulated timeline (:mod:`meshwright.graph`).
Starting and ending one costs a look-up and two stores: what describes a span is kept once, as a *label*, and times go
into arrays made beforehand. A step has a *block* of such arrays; blocks outside the window of steps that is kept are
used again, so that recording the last steps of a long run takes no more memory than they need.

On the CPU times are those of the host's monotonic clock. On a GPU they are events on the current stream, and are read
when the recording is: nothing waits for the device inside a step.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.graph import KIND, QUEUE

#: Spans a block has room for at first; it doubles.
CAPACITY = 1024


class Label(NamedTuple):
    """The label of a span. ``group`` are the global ranks that take part: of a collective all members, of a send the
    source and the target; () where the plan says it (:mod:`meshwright.run.assemble`). ``num_bytes`` are exchanged.
    ``inside``: the pass that began it stands still until it is over."""

    kind: str
    queue: str
    stage: int
    chunk: int
    microbatch: int
    layer: int
    key: str
    group: tuple[int, ...]
    num_bytes: int = 0
    inside: bool = False


class HeldMemory(NamedTuple):
    """Bytes held at an instant of this process's clock, and the most held since the sample before."""

    time_ns: int
    num_bytes: int
    peak_bytes: int


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of one process, in nanoseconds of its own clock: columns of equal length in order of start.

    ``label`` indexes ``labels``; ``end_ns`` is -1 for what had not ended; ``depth`` counts the open spans of the same
    queue a span began inside. ``steps`` are (number, begin, end) of every step kept.
    """

    rank: int
    host: str
    labels: tuple[Label, ...]
    label: NDArray[np.int32]
    step: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    depth: NDArray[np.int32]
    steps: tuple[tuple[int, int, int], ...]
    memory: tuple[HeldMemory, ...] = ()


class _Block:
    """The spans of one step: ``marks`` are the events of a GPU by span, beside the times."""

    __slots__ = ("begin", "capacity", "count", "end", "ended", "label", "late", "marks", "memory", "number", "started")

    def __init__(self, events: bool):
        self.capacity = CAPACITY
        self.label = np.empty(CAPACITY, np.int32)
        self.started = np.empty(CAPACITY, np.int64)
        self.ended = np.empty(CAPACITY, np.int64)
        self.marks: list[list] | None = [] if events else None
        self.clear(-1)

    def clear(self, number: int) -> None:
        self.number, self.count, self.begin, self.end = number, 0, 0, -1
        #: Ends of collectives, appended by whichever thread sees them; a new list, so that no late one finds its way
        #: into another step.
        self.late: list[tuple[int, int]] = []
        self.memory: list[HeldMemory] = []

    def grow(self) -> None:
        self.label, self.started, self.ended = (
            np.concatenate((column, np.empty_like(column))) for column in (self.label, self.started, self.ended)
        )
        self.capacity *= 2


class _Span:
    """``with recorder.span(...)``: ends its span however the block is left."""

    __slots__ = ("_recorder", "_token")

    def __init__(self, recorder: Recorder, token: int):
        self._recorder, self._token = recorder, token

    def __enter__(self) -> int:
        return self._token

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.stop(self._token)


class Recorder:
    """Records the steps after the first `warmup`, the last `keep` of them (None: all).

    Between ``step_end`` and the next ``step_begin`` nothing is recorded, nor while warming up: ``start`` returns -1
    then, which ``stop`` and ``watch`` take for "nothing". A span ends in the step it began in, but for a watched
    collective, which may end later.
    """

    on = True

    def __init__(
        self,
        *,
        rank: int = 0,
        device: torch.device | None = None,
        warmup: int = 0,
        keep: int | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`now` is the host's clock, nanoseconds."""
        self.rank, self.warmup, self.keep, self._now = rank, warmup, keep, now
        self.device = device or torch.device("cpu")
        self._gpu = self.device.type == "cuda"
        self._labels: dict[Label, int] = {}
        self._blocks: list[_Block] = []
        self._block: _Block | None = None
        self._seen = 0
        #: Bytes of all steps so far, those included that are not kept: by kind of exchange and ranks in its group.
        self.exchanged: dict[tuple[str, int], int] = {}
        self._resident = ResidentBytes()
        self._anchors: list[tuple[int, torch.cuda.Event]] = []

    def step_begin(self, number: int) -> None:
        """Step `number` begins."""
        self._seen += 1
        if self._seen <= self.warmup:
            return
        if self._gpu and not self._anchors:
            self._anchor()
        full = self.keep is not None and len(self._blocks) >= self.keep
        block = self._blocks.pop(0) if full else _Block(self._gpu)
        block.clear(number)
        self._blocks.append(block)
        self._block = block
        self.sample_memory()
        block.begin = self._now()

    def step_end(self) -> None:
        """The step is over. Does not wait for the device."""
        if self._block is None:
            return
        self._block.end = self._now()
        self.sample_memory()
        self._block = None

    def start(
        self,
        kind: str,
        queue: str = "compute",
        *,
        stage: int = -1,
        chunk: int = -1,
        microbatch: int = -1,
        layer: int = -1,
        key: str = "",
        group: tuple[int, ...] = (),
        num_bytes: int = 0,
        inside: bool = False,
    ) -> int:
        """A span begins; what :meth:`stop` or :meth:`watch` takes to end it.

        Kinds, queues and attributes are those of :mod:`meshwright.graph`; `key` names its cost (``BW 4 layers``).
        A transfer between two ranks is a ``send`` on both: the target's span ends when the message is there.

        Raises:
            ValueError: a kind or queue that does not exist.
        """
        if num_bytes:
            moved = (kind, len(group))
            self.exchanged[moved] = self.exchanged.get(moved, 0) + num_bytes
        block = self._block
        if block is None:
            return -1
        said = (kind, queue, stage, chunk, microbatch, layer, key, group, num_bytes, inside)
        label = self._labels.get(said)
        if label is None:
            label = self._new_label(said)
        at = block.count
        if at == block.capacity:
            block.grow()
        block.count = at + 1
        block.label[at] = label
        block.ended[at] = -1
        if block.marks is not None:
            self._mark(block, at, 0)
        block.started[at] = self._now()
        return at

    def stop(self, token: int) -> None:
        """The span ends."""
        block = self._block
        if token < 0 or block is None:
            return
        block.ended[token] = self._now()
        if block.marks is not None:
            self._mark(block, token, 1)

    def span(self, kind: str, queue: str = "compute", **said: Any) -> _Span:
        """:meth:`start` now, :meth:`stop` at the end of the ``with`` block."""
        return _Span(self, self.start(kind, queue, **said))

    def watch(self, work: torch.distributed.Work, token: int, *, waited: bool = False) -> int:
        """The span ends when the collective does, whoever waits for it, and whenever. A message that cannot say when it
        is out ends at once: its target knows when it is there. A collective that cannot (gloo's reduce-scatter) ends so
        too, unless it is ``waited`` for: then the token is returned, for :meth:`stop` when it has been; else -1."""
        block = self._block
        if token < 0 or block is None:
            return -1
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's messages have none
            if waited:
                return token
            self.stop(token)
            return -1
        if block.marks is not None:
            # the callback runs under a stream that waits for the collective
            future.then(lambda _: self._mark(block, token, 1))
            block.ended[token] = 0
            return -1
        late = block.late
        future.then(lambda _: late.append((token, self._now())))
        return -1

    def sample_memory(self) -> None:
        """Note the memory in use now: of the GPU what torch allocated, else what the process holds."""
        if self._block is None:
            return
        if self._gpu:
            held, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        else:
            held = peak = self._resident()
        self._block.memory.append(HeldMemory(self._now(), held, peak))

    def recording(self) -> Recording:
        """Everything kept. On a GPU waits for it."""
        if self._gpu:
            self._anchor()
        blocks = [b for b in self._blocks if b is not self._block]
        for block in blocks:
            for token, at in list(block.late):
                block.ended[token] = at
        columns = [self._times(b) for b in blocks]
        empty = (np.empty(0, np.int64), np.empty(0, np.int64))
        label = np.concatenate([b.label[: b.count] for b in blocks] or [np.empty(0, np.int32)])
        start, end = (np.concatenate([c[i] for c in columns] or [empty[i]]) for i in (0, 1))
        queues = np.array([QUEUE[said[1]] for said in self._labels] or [0], np.int32)
        return Recording(
            rank=self.rank,
            host=socket.gethostname(),
            labels=tuple(Label(*said) for said in self._labels),
            label=label,
            step=np.concatenate([np.full(b.count, b.number, np.int32) for b in blocks] or [np.empty(0, np.int32)]),
            start_ns=start,
            end_ns=end,
            depth=_depth(queues[label], start, end),
            steps=tuple((b.number, b.begin, b.end) for b in blocks),
            memory=tuple(m for b in blocks for m in b.memory),
        )

    def _new_label(self, said: tuple) -> int:
        for word, known in ((said[0], KIND), (said[1], QUEUE)):
            if word not in known:
                raise ValueError(f"{word!r} is none of {', '.join(known)}")
        return self._labels.setdefault(said, len(self._labels))

    def _mark(self, block: _Block, at: int, which: int) -> None:
        """Record an event of span `at` on the current stream; events are used again with their block."""
        while len(block.marks) <= at:
            block.marks.append([torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)])
        block.marks[at][which].record()

    def _anchor(self) -> None:
        """One instant on both clocks, the host's and the device's."""
        torch.cuda.synchronize(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        torch.cuda.synchronize(self.device)
        self._anchors = [*self._anchors[:1], (self._now(), event)]

    def _times(self, block: _Block) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of the block's spans on the host's clock."""
        n = block.count
        started, ended = block.started[:n].copy(), block.ended[:n].copy()
        if block.marks is None or not n:
            return started, ended
        (first_ns, first), (last_ns, last) = self._anchors[0], self._anchors[-1]
        between_ms = first.elapsed_time(last)
        # the device's clock drifts from the host's: both anchors agree
        rate = (last_ns - first_ns) / between_ms if between_ms > 0 else 1e6
        base = block.marks[0][0]
        # elapsed times are float32 milliseconds: long ones are rounded, so spans count from their block's first and
        # that from the anchor it is near to
        base_ns = last_ns - base.elapsed_time(last) * rate
        for i in range(n):
            started[i] = base_ns + base.elapsed_time(block.marks[i][0]) * rate
            if ended[i] >= 0:
                ended[i] = base_ns + base.elapsed_time(block.marks[i][1]) * rate
        return started, ended


class Off:
    """A recorder that records nothing."""

    on = False

    def step_begin(self, number: int) -> None: ...

    def step_end(self) -> None: ...

    def start(self, kind: str, queue: str = "compute", **said: Any) -> int:
        return -1

    def stop(self, token: int) -> None: ...

    def span(self, kind: str, queue: str = "compute", **said: Any) -> _Nothing:
        return _NOTHING

    def watch(self, work: torch.distributed.Work, token: int, *, waited: bool = False) -> int:
        return -1

    def sample_memory(self) -> None: ...


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> int:
        return -1

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


class ResidentBytes:
    """How much memory this process holds: called at every step, so the system's file stays open."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._file = -1

    def __call__(self) -> int:
        """Bytes now, 0 where the system does not say."""
        return int(os.pread(self._file, 128, 0).split()[1]) * resource.getpagesize() if self._file >= 0 else 0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _depth(queue: NDArray, start: NDArray, end: NDArray) -> NDArray[np.int32]:
    """How many spans of its queue each span lies inside; spans are in order of start within a queue. What had not
    ended holds nothing."""
    out = np.zeros(len(start), np.int32)
    for q in np.unique(queue):
        open_until: list[int] = []
        for i in np.flatnonzero(queue == q).tolist():
            while open_until and open_until[-1] <= start[i]:
                open_until.pop()
            inside = bool(open_until) and 0 <= end[i] <= open_until[-1]
            out[i] = len(open_until) if inside else 0
            if end[i] >= 0 and (inside or not open_until):
                open_until.append(int(end[i]))
    return out


_current: Recorder | Off = Off()


def recorder() -> Recorder | Off:
    """The recorder of this process: what layers and collectives write their spans to."""
    return _current


def install(chosen: Recorder | Off) -> None:
    """Make `chosen` the recorder of this process."""
    global _current
    _current = chosen
