"""A virtual clock for processes that make batches ahead: what waits for whom takes the same time on any machine.

The rank and its workers sleep on one clock, a number in memory that all of them see. It moves on to whoever wakes next
once everybody who has something to do sleeps; what they do in between takes no time.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from math import inf

import numpy as np

#: Real seconds in which a process has to come to its next sleep.
PATIENCE_S = 60.0


class FeedClock:
    """The clock of a rank, which makes it, and of so many ``workers``, its forks: worker w of n makes batches w, w + n
    and so on, from the ``first`` one on. ``asked`` returns the number behind the last batch that was asked for."""

    def __init__(self, workers: int, first: int):
        self.workers, self.first, self.rank = workers, first, os.getpid()
        self.asked: Callable[[], int] = lambda: first
        shared = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)
        self._now, self._wakes, self._made = shared[:1], shared[1 : 1 + workers], shared[1 + workers : 1 + 2 * workers]
        self._wakes[:] = inf

    def now(self) -> float:
        """Return the seconds since it was made."""
        return float(self._now[0])

    def sleep(self, seconds: float) -> None:
        """Let time pass for the rank."""
        wakes = self.now() + seconds
        while (first := self._first()) < wakes:
            self._now[0] = first
        self._now[0] = wakes

    def work(self, batch: int, seconds: float) -> None:
        """Let time pass for whoever makes a batch: its worker, or the rank itself."""
        if os.getpid() == self.rank:
            self.sleep(seconds)
            return
        worker, wakes = batch % self.workers, self.now() + seconds
        self._wakes[worker] = wakes
        _until(lambda: self.now() >= wakes)
        self._wakes[worker] = inf
        self._made[worker] += 1

    def await_made(self, batch: int) -> None:
        """Let time pass until a batch is made."""
        while True:
            first, worker = self._first(), batch % self.workers
            if self._made[worker] >= self._count(worker, batch + 1):
                return
            assert first < inf, f"nobody makes batch {batch}"
            self._now[0] = first

    def _first(self) -> float:
        """When the next worker wakes, once all that have something to do sleep."""
        end = self.asked()

        def sleeps(worker: int) -> bool:
            return self._made[worker] >= self._count(worker, end) or self.now() < self._wakes[worker] < inf

        _until(lambda: all(sleeps(worker) for worker in range(self.workers)))
        return float(self._wakes.min(initial=inf))

    def _count(self, worker: int, end: int) -> int:
        """The batches of a worker before `end`."""
        return len(range(self.first + (worker - self.first) % self.workers, end, self.workers))


def _until(holds: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(2e-4)
