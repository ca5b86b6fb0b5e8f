"""A training rank that draws its batches from a reservoir, on the virtual clock: producers stream, steps never wait
once there is enough, and the decider of the reservoir says what is kept and what is trained on."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import msgspec

from meshwright.world.reservoir import (
    BatchAsked,
    GiveBatch,
    KeepSample,
    ReservoirControl,
    SampleCame,
)

#: Steps that are measured, times that the reservoir's room has come before them, and steps that are simulated at most.
MEASURED, TIMES, MOST_STEPS = 400, 2.0, 20_000


class StreamSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The stream into a rank's reservoir: so many ``producers`` (of this rank, at least one), each of which makes a
    sample in ``make_s`` and then sends it over the rank's link in ``send_s``, one after the other; a step trains on
    ``samples`` in ``step_s``, and its batch is copied in ``copy_s`` first."""

    control: ReservoirControl
    producers: int
    make_s: float
    send_s: float
    samples: int
    step_s: float
    copy_s: float = 0.0


class StreamedSteps(NamedTuple):
    """Steps of a stream in seconds: when the first began, what one takes in the steady state and how long it waits;
    the share of a batch that is fresh (``fresh``), how often a sample is trained on (``uses``), and the share of the
    time for which a producer is held (``held``), all in the steady state."""

    first_s: float
    period_s: float
    wait_s: float
    fresh: float
    uses: float
    held: float


def streamed(sizes: StreamSizes) -> StreamedSteps:
    """Simulate the steps of a rank from a cold start into their steady state."""
    return _Stream(sizes).run()


class _Stream:
    """Producers, their link and a rank."""

    def __init__(self, sizes: StreamSizes):
        self.sizes, self.state = sizes, sizes.control.begin()
        #: (time, what, producer): 0 a sample is made, 1 it is there, 2 a step ends.
        self.events = [(sizes.make_s * (i + 1) / sizes.producers, 0, i) for i in range(sizes.producers)]
        heapq.heapify(self.events)
        self.link_free = 0.0
        self.came = 0
        self.owner: dict[int, int] = {}
        self.held: dict[int, float] = {}
        self.held_s = 0.0
        self.asked_s = 0.0
        self.begun: list[tuple[float, float, int, int, float]] = []

    def run(self) -> StreamedSteps:
        sizes, warm = self.sizes, 0
        self._tell(BatchAsked(sizes.samples), 0.0)
        while True:
            now, what, producer = heapq.heappop(self.events)
            if what == 0:
                self.link_free = max(now, self.link_free) + sizes.send_s
                heapq.heappush(self.events, (self.link_free, 1, producer))
            elif what == 1:
                self.owner[self.came] = producer
                self.came += 1
                self._tell(SampleCame(self.came - 1), now)
            else:
                count = len(self.begun)
                if not warm and (self.came >= TIMES * sizes.control.room or count >= MOST_STEPS - MEASURED):
                    warm = count
                if warm and count >= warm + MEASURED:
                    return self._told(warm)
                self.asked_s = now
                self._tell(BatchAsked(sizes.samples), now)

    def _tell(self, event: SampleCame | BatchAsked, now: float) -> None:
        self.state, decisions = self.sizes.control.decide(self.state, event)
        for decision in decisions:
            if isinstance(decision, GiveBatch):
                held = self.held_s + sum(now - since for since in self.held.values())
                self.begun.append((now, now - self.asked_s, decision.fresh, self.came, held))
                heapq.heappush(self.events, (now + self.sizes.copy_s + self.sizes.step_s, 2, 0))
            elif isinstance(decision, KeepSample):
                producer = self.owner.pop(decision.sample)
                self.held_s += now - self.held.pop(decision.sample, now)
                heapq.heappush(self.events, (now + self.sizes.make_s, 0, producer))
            else:
                self.held[decision.sample] = now

    def _told(self, warm: int) -> StreamedSteps:
        some, sizes = self.begun[warm - 1 :], self.sizes
        spent, count = some[-1][0] - some[0][0], len(some) - 1
        came = some[-1][3] - some[0][3]
        return StreamedSteps(
            first_s=self.begun[0][0],
            period_s=spent / count,
            wait_s=sum(one[1] for one in some[1:]) / count,
            fresh=sum(one[2] for one in some[1:]) / (count * sizes.samples),
            uses=count * sizes.samples / came if came else float("inf"),
            held=(some[-1][4] - some[0][4]) / (spent * sizes.producers),
        )
