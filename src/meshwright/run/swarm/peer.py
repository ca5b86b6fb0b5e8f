"""The process of a peer: it does what it is told in the order in which it comes, and holds nothing of a microbatch
between two passes."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from meshwright.run.data import Corpus
from meshwright.run.held import peak_bytes
from meshwright.run.job import Job
from meshwright.run.swarm.living import Inbox, slowed
from meshwright.run.swarm.parcels import (
    BeginStep,
    DoPass,
    GiveState,
    HoldStage,
    LeaveSwarm,
    Order,
    PassMade,
    StageHeld,
    State,
    Summed,
    SumOver,
    Update,
    Updated,
    send,
)
from meshwright.run.swarm.stage import PeerStage

#: So long peers that meet to sum wait for one another: one that died never comes.
PATIENCE = timedelta(seconds=30)


class StagePeer:
    """The work of a peer's process; `slowness`: times that everything takes over what this device takes."""

    def __init__(self, way: Connection, slowness: float, job: Job, corpus: Corpus):
        self.way, self.job, self.corpus, self.slowness = way, job, corpus, slowness
        self.inbox = Inbox(way, Order)
        self.stage: PeerStage | None = None
        self.groups: dict[str, Any] = {}

    def run(self) -> None:
        """Do what is told until the end."""
        while True:
            order, body = self.inbox.next()
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
                    send(self.way, Updated(slowed(begun, self.slowness), peak_bytes(torch.device("cpu"))))
                case GiveState(taker=taker):
                    send(self.way, State(taker), self.stage.state())
                case LeaveSwarm():
                    return

    def _compute(self, order: DoPass, body: bytes) -> None:
        begun = time.perf_counter()
        made, loss = self.stage.compute(order.microbatch, order.backward, body)
        send(self.way, PassMade(order.number, slowed(begun, self.slowness), loss), made)

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
