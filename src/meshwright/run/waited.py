"""Collectives that cannot say when they end, which a thread waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Queue

import torch


class WaitedWorks:
    """Works in the order in which they were begun; the thread begins with the first."""

    def __init__(self) -> None:
        self._works: Queue = Queue()
        self._thread: threading.Thread | None = None

    def put(
        self, work: torch.distributed.Work, ends: list[tuple[int, int]], token: int, now: Callable[[], int]
    ) -> None:
        """Have (`token`, the time `now`) appended to `ends` when a work is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="waited", daemon=True)
            self._thread.start()
        self._works.put((work, ends, token, now))

    def join(self) -> None:
        """Return when all that were put are done."""
        if self._thread is not None:
            self._works.join()

    def _wait(self) -> None:
        while True:
            work, ends, token, now = self._works.get()
            with suppress(RuntimeError):  # whoever needs its result is told
                work.wait()
            ends.append((token, now()))
            self._works.task_done()
