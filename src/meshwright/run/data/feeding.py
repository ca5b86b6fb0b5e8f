"""Batches made ahead of the step that trains on them, by processes of their own.

What a step trains on is a pure function of its number, so that whoever makes a batch, and when, changes nothing: the
batches are those of a run without workers, in the same order, also after the run was killed and resumed. Worker w of n
makes those of steps w, w + n, and so on; at most ``ahead`` are made or under way beside the one in training.

Workers are forks of their rank, as torch's DataLoader has them: the corpus, which is mapped, and what the rank knows of
its share are theirs without a copy. A batch comes back in memory that both see. A worker whose rank is gone reads the
end of its pipe, and ends; it keeps no other file or socket of the rank open, so that nobody waits for one that died.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

import msgspec
import numpy as np
import torch

from meshwright.errors import MeshwrightError
from meshwright.run.data.corpus import Batch

#: Seconds that a worker has to end after its pipe was closed; then it is killed.
ENDS_S = 2.0
#: Bytes that columns of a batch begin at multiples of.
ALIGNED = 64
_STEP = struct.Struct("<q")


class _Made(msgspec.Struct):
    """A batch in shared memory: of each of its columns type and sizes ("" for one that it lacks), or why there is
    none."""

    columns: list[tuple[str, list[int]]] = []
    num_targets: int = 0
    why: str = ""


class _Worker:
    """The end of a worker that its rank has: the process, and the pipes to ask and be answered by."""

    def __init__(self, pid: int, asks: int, answers: int):
        self.pid, self.asks, self.answers = pid, asks, os.fdopen(answers, "rb")

    def ask(self, step: int) -> None:
        with suppress(BrokenPipeError):  # it has ended, as its next answer says
            os.write(self.asks, _STEP.pack(step))

    def answer(self) -> _Made | None:
        """Return the next answer, None from one that has ended."""
        size = self.answers.read(_STEP.size)
        if len(size) < _STEP.size:
            return None
        return msgspec.msgpack.decode(self.answers.read(_STEP.unpack(size)[0]), type=_Made)


class Feeding:
    """The batches of steps ``first`` to ``last`` (without it), by ``make`` in so many ``workers``; 0: as they are
    asked for. ``waited_s`` is how long the last one was waited for, and ``make_s`` how long the first one, which is
    made here, took."""

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, *, workers: int = 0, ahead: int = 0):
        self.make, self.next, self.last = make, first, last
        self.ahead = max(1, ahead or 2 * workers)
        self.waited_s = self.make_s = 0.0
        self._kept: dict[int, Batch] = {}
        self._workers: list[_Worker] = []
        if workers and first < last:
            begun = time.perf_counter()
            self._kept[first] = made = make(first)
            self.make_s = time.perf_counter() - begun
            self.next, self.room = first + 1, _room(made)
            self.shared = mmap.mmap(-1, self.room * self.ahead)
            self._workers = [self._fork() for _ in range(workers)]
            for step in range(self.next, min(last, self.next + self.ahead)):
                self._of(step).ask(step)

    def take(self, step: int) -> Batch:
        """Return the batch of a step; those before it are not asked for again.

        Raises:
            MeshwrightError: D011 when a worker failed or ended.
        """
        begun = time.perf_counter()
        if not self._workers:
            batch = self.make(step)
        else:
            while self.next <= step:
                self._kept[self.next] = self._received(self.next)
                self.next += 1
            batch = self._kept[step]
            self._kept = {number: one for number, one in self._kept.items() if number >= step}
        self.waited_s = time.perf_counter() - begun
        return batch

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            os.close(worker.asks)
            worker.answers.close()
        until = time.monotonic() + ENDS_S
        for worker in self._workers:
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
                    break
                time.sleep(0.001)
        if self._workers:
            self.shared.close()
        self._workers = []

    def _of(self, step: int) -> _Worker:
        return self._workers[step % len(self._workers)]

    def _received(self, step: int) -> Batch:
        """The batch of the next step, copied out, so that its place is free for another."""
        made = self._of(step).answer()
        if made is None or made.why:
            message = f"a process that makes batches ahead {made.why if made else 'has ended'}"
            help = "its error is above; --data-workers 0 makes batches in the step's own process"
            raise MeshwrightError.one("D011", message, place="--data-workers", help=help)
        batch = _copied(self.shared, (step % self.ahead) * self.room, made)
        if step + self.ahead < self.last:
            self._of(step + self.ahead).ask(step + self.ahead)
        return batch

    def _fork(self) -> _Worker:
        asked, asks = os.pipe()
        answers, answered = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside threads: a worker starts none, and uses none of the rank's
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(asked)
            os.close(answered)
            return _Worker(pid, asks, answers)
        try:
            self._work(asked, answered)
        except BaseException:  # a fork has no caller to raise to
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)

    def _work(self, asked: int, answered: int) -> None:
        """Make what is asked for until nobody asks any more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which goes to all processes
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close_all_but(asked, answered)
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        while len(said := os.read(asked, _STEP.size)) == _STEP.size:
            (step,) = _STEP.unpack(said)
            try:
                made = _put(self.make(step), self.shared, (step % self.ahead) * self.room, self.room)
            except Exception as error:  # whatever a reader raises, the rank is told
                os.write(2, traceback.format_exc().encode())
                made = _Made(why=f"failed: {type(error).__name__}: {error}")
            words = msgspec.msgpack.encode(made)
            with_size = _STEP.pack(len(words)) + words
            try:
                os.write(answered, with_size)
            except BrokenPipeError:
                return


def _close_all_but(*kept: int) -> None:
    """Close every file of the rank but its standard ones and these."""
    at = 3
    for one in sorted(kept):
        os.closerange(at, one)
        at = one + 1
    os.closerange(at, os.sysconf("SC_OPEN_MAX"))


def _room(batch: Batch) -> int:
    """Bytes that a batch of the same rows takes at most: any column may be there."""
    return 4 * (batch.tokens.numel() * 8 + ALIGNED) + mmap.PAGESIZE


def _put(batch: Batch, shared: mmap.mmap, at: int, room: int) -> _Made:
    """Write the columns of a batch at a place of shared memory."""
    columns = [None if one is None else one.contiguous().numpy() for one in batch[:4]]
    sizes = [0 if one is None else -(-one.nbytes // ALIGNED) * ALIGNED for one in columns]
    if sum(sizes) > room:
        raise ValueError(f"a batch of {sum(sizes):,} bytes, where the first one had room for {room:,}")
    for column, begin in zip(columns, accumulate(sizes, initial=at)):
        if column is not None:
            np.frombuffer(shared, column.dtype, column.size, begin)[:] = column.ravel()
    said = [("", []) if one is None else (one.dtype.str, list(one.shape)) for one in columns]
    return _Made(columns=said, num_targets=batch.num_targets)


def _copied(shared: mmap.mmap, at: int, made: _Made) -> Batch:
    """A batch out of a place of shared memory."""
    out = []
    for kind, shape in made.columns:
        if not kind:
            out.append(None)
            continue
        size = int(np.prod(shape))
        column = np.frombuffer(shared, kind, size, at).reshape(shape).copy()
        out.append(torch.from_numpy(column))
        at += -(-column.nbytes // ALIGNED) * ALIGNED
    return Batch(*out, made.num_targets)
