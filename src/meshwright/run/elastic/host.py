"""A host of an elastic run: the process that keeps a rank's memory, and starts and ends the worker that trains.

It does nothing else, so that little can go wrong with it; it opens no process group and no thread. When the launcher is
gone it asks its worker to end in order, so that what was trained is saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from meshwright.run.elastic.formation import Begin, Born, Leave, Order, Over, Settled, Word
from meshwright.run.elastic.memory import SLOTS
from meshwright.run.launch import ASKING, end_process

#: Linux's prctl option that has a signal sent to this process when the one that started it ends.
_PDEATHSIG = 1
#: Seconds between looks at whether the launcher is there.
_LOOK_S = 0.5

#: What a worker does: as ordered, from the slots that there are, with new ones, saying so to its host, and to the
#: launcher itself which steps are done.
Worker = Callable[[Begin, Sequence[int], Sequence[int], Connection, Connection], None]


def follow(parent: int, number: int) -> None:
    """Have this process be sent a signal when the process `parent`, which started it, ends, or has ended."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def live(orders: Connection, done: Connection, launcher: int, train: Worker, inherited: Sequence[Connection]) -> None:
    """The whole life of a host; never returns. `inherited` are the launcher's ends of pipes; `train` is what a worker
    does, which says the steps that are done in `done`."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    for one in inherited:
        one.close()
    one = _Host(orders, done, launcher, train)
    try:
        one.run()
    except OSError:  # the launcher ended while it was spoken to
        one.orphaned()
    end_process(0)


class _Host:
    def __init__(self, orders: Connection, done: Connection, launcher: int, train: Worker):
        self.orders, self.done, self.launcher, self.train = orders, done, launcher, train
        self.slots: dict[int, list[int]] = {}
        self.worker: Any = None
        self.words: Connection | None = None
        self.epoch = -1
        self.over = False

    def run(self) -> None:
        while True:
            waits = [self.orders, *([self.words, self.worker.sentinel] if self.worker else [])]
            ready = wait(waits, timeout=_LOOK_S)
            if self.words in ready:
                self._hear()
            elif self.worker is not None and self.worker.sentinel in ready:
                self._ended()
            if os.getppid() != self.launcher:
                return self.orphaned()
            if self.orders in ready:
                try:
                    order = msgspec.json.decode(self.orders.recv_bytes(), type=Order)
                except (EOFError, OSError):
                    return self.orphaned()
                if not self._obey(order):
                    return

    def _obey(self, order: Order) -> bool:
        """Do what is ordered; whether to go on."""
        match order:
            case Begin():
                self._end()
                self._begin(order)
            case Leave():
                self._end()
                return False
            case _:
                self._ask()
        return True

    def _begin(self, order: Begin) -> None:
        self.epoch, self.over = order.epoch, False
        before = [fd for fds in self.slots.values() for fd in fds]
        fds = [os.memfd_create(f"meshwright-{order.epoch}-{i}") for i in range(SLOTS)]
        self.slots[order.epoch] = fds
        self.words, theirs = multiprocessing.Pipe(duplex=False)
        words = (order, before, fds, theirs, self.done, (self.words, self.orders), os.getpid(), self.train)
        self.worker = multiprocessing.get_context("fork").Process(target=_work, args=words)
        self.worker.start()
        theirs.close()
        self._say(Born(order.epoch, self.worker.pid))

    def _hear(self) -> None:
        """Pass on what the worker says; older formations' memory is of no use once a new one's is whole."""
        try:
            said = self.words.recv_bytes()
        except (EOFError, OSError):
            return self._ended()
        word = msgspec.json.decode(said, type=Word)
        self.over |= isinstance(word, Over)
        if isinstance(word, Settled):
            for epoch in [e for e in self.slots if e < word.epoch]:
                for fd in self.slots.pop(epoch):
                    os.close(fd)
        self.orders.send_bytes(said)

    def _ended(self) -> None:
        self.worker.join()
        code, self.worker = self.worker.exitcode, None
        self.words.close()
        if not self.over:
            self._say(Over(self.epoch, None, code))

    def _ask(self) -> None:
        if self.worker is not None and self.worker.exitcode is None:
            os.kill(self.worker.pid, signal.SIGTERM)

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.join()
            self.words.close()
            self.worker = None

    def orphaned(self) -> None:
        """Nobody gives orders any more: what is trained is saved and left."""
        self._ask()
        if self.worker is not None:
            self.words.close()
            self.worker.join()

    def _say(self, word: Word) -> None:
        self.orders.send_bytes(msgspec.json.encode(word))


def _work(
    order: Begin,
    before: Sequence[int],
    fds: Sequence[int],
    words: Connection,
    done: Connection,
    inherited: Sequence[Connection],
    host: int,
    train: Worker,
) -> None:
    """The whole life of a worker; never returns."""
    follow(host, signal.SIGKILL)
    for one in inherited:
        one.close()
    train(order, before, fds, words, done)
    end_process(0)
