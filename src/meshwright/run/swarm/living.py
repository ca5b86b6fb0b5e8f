"""The life of a peer's process: it takes up what it is told at once, and ends with whoever started it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from meshwright.run import launch
from meshwright.run.elastic.host import follow
from meshwright.run.environment import keep_memory, num_threads
from meshwright.run.swarm.parcels import PeerFailed, receive, send


class Runs(Protocol):
    """The work of a peer's process does."""

    def run(self) -> None:
        """Do what is told until the end."""


def live(
    way: Connection, parent: int, inherited: Sequence[Connection], make: Callable[..., Runs], slowness: float
) -> None:
    """The whole life of a peer, which is made of its way and `slowness` (times that everything takes over what this
    device takes); never returns."""
    for number in launch.ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.ASKING)
    follow(parent, signal.SIGKILL)
    for one in inherited:
        one.close()
    keep_memory()
    torch.set_num_threads(num_threads())
    try:
        make(way, slowness).run()
    except (EOFError, OSError):  # whoever trains is gone
        launch.end_process(1)
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(way, PeerFailed(launch.report_of(error)))
        launch.end_process(1)
    launch.end_process(0)


class Inbox:
    """The words of type `kind` that a peer is told, taken up at once: nobody waits until it has time for them."""

    def __init__(self, way: Connection, kind: Any):
        self._way, self._kind = way, kind
        self._inbox: SimpleQueue[tuple[Any, bytes] | OSError] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(receive(self._way, self._kind))
        except (EOFError, OSError):
            self._inbox.put(OSError())

    def next(self) -> tuple[Any, bytes]:
        """The next word, and what comes along; raises OSError where whoever trains is gone."""
        found = self._inbox.get()
        if isinstance(found, OSError):
            raise found
        return found


def slowed(begun: float, slowness: float) -> float:
    """Seconds since `begun`, which take so many times as long."""
    took = time.perf_counter() - begun
    time.sleep(max(0.0, (slowness - 1) * took))
    return took
