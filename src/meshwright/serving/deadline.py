"""Earliest deadline first: of those who wait the one runs first whose first token is wanted first.

The deadline of a request is its arrival and the bound on the time to first token of its class of objectives. On one
machine no order meets deadlines that this one cannot (Jackson 1955; Liu and Layland 1973); beyond what the machine can
do it spends itself on those that are late already. Whoever has no deadline waits for those who have one.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import WaitingQueue
from meshwright.serving.priority import RankedQueue


class DeadlineQueue(RankedQueue):
    """A queue in order of deadlines."""

    def rank(self, one: EngineRequest) -> object:
        """Return when its first token is wanted, the earliest first."""
        return one.new.deadline_s <= 0, one.new.deadline_s, one.order


class Deadline(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "deadline"
    title: str = "the earliest wanted first token first (EDF)"
    goes_by: str = "ttft"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return DeadlineQueue()


POLICY = Deadline()
