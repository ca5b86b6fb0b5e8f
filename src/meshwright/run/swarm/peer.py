"""The process of a peer: it does what it is told in the order in which it comes, and holds nothing of a microbatch
between two passes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from meshwright.run import launch
from meshwright.run.data import Corpus
from meshwright.run.elastic.host import follow
from meshwright.run.environment import keep_memory, num_threads
from meshwright.run.held import peak_bytes
from meshwright.run.job import Job
from meshwright.run.swarm.parcels import (
    BeginStep,
    DoPass,
    GiveState,
    HoldStage,
    LeaveSwarm,
    Order,
    PassMade,
    PeerFailed,
    StageHeld,
    State,
    Summed,
    SumOver,
    Update,
    Updated,
    receive,
    send,
)
from meshwright.run.swarm.stage import PeerStage

#: So long peers that meet to sum wait for one another: one that died never comes.
PATIENCE = timedelta(seconds=30)


def live(
    way: Connection, parent: int, inherited: Sequence[Connection], job: Job, corpus: Corpus, slowness: float
) -> None:
    """The whole life of a peer; never returns. `slowness`: times that everything takes over what this device takes."""
    for number in launch.ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.ASKING)
    follow(parent, signal.SIGKILL)
    for one in inherited:
        one.close()
    keep_memory()
    torch.set_num_threads(num_threads())
    try:
        _Peer(way, job, corpus, slowness).run()
    except (EOFError, OSError):  # whoever trains is gone
        launch.end_process(1)
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(way, PeerFailed(launch.report_of(error)))
        launch.end_process(1)
    launch.end_process(0)


class _Peer:
    def __init__(self, way: Connection, job: Job, corpus: Corpus, slowness: float):
        self.way, self.job, self.corpus, self.slowness = way, job, corpus, slowness
        self.inbox: SimpleQueue[tuple[Order, bytes] | OSError] = SimpleQueue()
        self.stage: PeerStage | None = None
        self.groups: dict[str, Any] = {}
        # what comes is taken up at once, so that nobody waits until this peer has time for it
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                self.inbox.put(receive(self.way, Order))
        except (EOFError, OSError):
            self.inbox.put(OSError())

    def run(self) -> None:
        """Do what is told until the end."""
        while True:
            found = self.inbox.get()
            if isinstance(found, OSError):
                raise found
            order, body = found
            match order:
                case HoldStage(stage=stage, step=step):
                    self.stage = PeerStage(self.job, stage, step, body, self.corpus)
                    send(self.way, StageHeld())
                case BeginStep(step=step):
                    self.stage.begin(step)
                case DoPass():
                    self._compute(order, body)
                case SumOver():
                    self._sum(order)
                case Update(norm=norm):
                    begun = time.perf_counter()
                    self.stage.update(norm)
                    send(self.way, Updated(self._slowed(begun), peak_bytes(torch.device("cpu"))))
                case GiveState(taker=taker):
                    send(self.way, State(taker), self.stage.state())
                case LeaveSwarm():
                    return

    def _compute(self, order: DoPass, body: bytes) -> None:
        begun = time.perf_counter()
        made, loss = self.stage.compute(order.microbatch, order.backward, body)
        send(self.way, PassMade(order.number, self._slowed(begun), loss), made)

    def _slowed(self, begun: float) -> float:
        """Seconds that something took, which takes as much longer as this peer is slow."""
        took = time.perf_counter() - begun
        time.sleep(max(0.0, (self.slowness - 1) * took))
        return took

    def _sum(self, order: SumOver) -> None:
        begun, square, cause = time.perf_counter(), 0.0, ""
        try:
            square = self.stage.sum(self._group(order))
        except RuntimeError as error:  # one of them has died: they are told to meet anew
            cause = str(error).partition("\n")[0]
        send(self.way, Summed(order.number, square, time.perf_counter() - begun, cause))

    def _group(self, order: SumOver) -> Any:
        """The peers that sum together, who meet once."""
        if order.size == 1:
            return None
        if order.store not in self.groups:
            store = dist.FileStore(order.store, order.size)
            self.groups[order.store] = dist.ProcessGroupGloo(store, order.index, order.size, timeout=PATIENCE)
        return self.groups[order.store]
