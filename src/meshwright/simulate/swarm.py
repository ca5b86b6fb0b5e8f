"""A pipeline of pools of peers on a virtual clock: the decider of ``world/swarm.py`` with predicted times.

A peer computes what it is asked in the order in which it arrives, and its port takes one message at a time in each
direction; whoever trains is never waited for. Between the last pass of a step and the first of the next the peers of
each stage sum their gradients and update. The decider is told of peers that are lost and of those that join when the
world says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.world.crowd import ALIKE, Slowness
from meshwright.world.decider import LogEntry
from meshwright.world.swarm import (
    AskPeer,
    GradientsSummed,
    PassDone,
    PeerJoined,
    PeerLost,
    PeerReady,
    Request,
    StageLost,
    StepBegun,
    SumGradients,
    Swarm,
    SwarmDecision,
    SwarmEvent,
    TakeStage,
    UpdateStages,
)
from meshwright.world.trace import WorldEvent

#: Queues that what goes into a stage is told on, and what comes out of it in a forward and in a backward.
IN, OUT = "link_forward", ("pp_forward", "pp_backward")


class SwarmSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a swarm: seconds of a forward and of a backward (which computes the forward again) of every stage on
    every peer [peers][stages], those that a message of one microbatch's hidden states holds a peer's port, with its
    bytes, and that one more is encoded or decoded; of each stage those of the sum of its gradients among n peers
    (``sum_s[stage][n]``), of its update, and of its state from one peer to another."""

    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    message_s: tuple[float, ...]
    message_bytes: int
    code_s: float
    sum_s: tuple[tuple[float, ...], ...]
    update_s: tuple[tuple[float, ...], ...]
    state_s: tuple[float, ...]

    def messages(self, request: Request) -> tuple[int, int]:
        """Messages to a peer, and from it, of a request: hidden states in and out, or hidden states and a gradient in
        and a gradient out; the first stage takes tokens, and the last one gives a loss."""
        inner, outer = request.stage > 0, request.stage + 1 < len(self.state_s)
        return (inner + outer, int(inner)) if request.backward else (int(inner), int(outer))


class PeerShare(msgspec.Struct, frozen=True):
    """The work of a peer: requests that it answered, the part of the time in which it computed, and its last stage (-1:
    it was gone)."""

    passes: int
    busy: float
    stage: int


class PeerSpan(NamedTuple):
    """Something that a peer did in a step, in seconds from its beginning: its ``queue`` and ``kind`` are those of a
    graph's tasks, ``microbatch`` -1 for what is of the whole step."""

    peer: int
    queue: str
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class SwarmRun(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a swarm: the seconds of each, what every peer did, how often peers changed their stage, were lost and
    joined, requests that were asked again because of that, seconds of a step that gradients were summed and
    parameters updated for, seconds of a step that a peer computed, in the mean, bytes of messages a step, and what
    everybody did in the last (``spans``). Where one rank asks peers for its experts, ``waited_s`` are the seconds of a
    step that it waited for them, ``left_out`` the share of the answers that did not come in time."""

    step_s: tuple[float, ...]
    peers: tuple[PeerShare, ...]
    moved: int
    lost: int
    joined: int
    again: int
    sum_s: float
    update_s: float
    computing_s: float
    sent_bytes: float
    waited_s: float = 0.0
    left_out: float = 0.0
    spans: tuple[PeerSpan, ...] = ()
    log: tuple[LogEntry, ...] = ()

    @property
    def mean_s(self) -> float:
        """Seconds of a step in the mean, without the first where there are more: no speed is known in that."""
        return fmean(self.step_s[1:] or self.step_s)

    def to_json(self) -> dict[str, Any]:
        """The run as plain values, without the spans and the log."""
        said = [name for name in self.__struct_fields__ if name not in ("spans", "log")]
        return {name: msgspec.to_builtins(getattr(self, name)) for name in said} | {"mean_s": self.mean_s}


class SwarmWorld(NamedTuple):
    """The world of a swarm: times that everything takes on each peer, and its messages; how passes vary, and failures
    in order. A peer that fails is back when the trace says so, else a spare stands in for it ``restart_s`` later while
    there are ``spares`` (None: always), else after ``repair_s``."""

    computing: tuple[float, ...]
    sending: tuple[float, ...]
    jitter: Slowness = ALIKE
    seed: int = 0
    failures: Iterable[WorldEvent] = ()
    spares: int | None = None
    repair_s: float = 86_400.0
    restart_s: float = 0.0


def simulate_swarm(sizes: SwarmSizes, decider: Swarm, world: SwarmWorld, num_steps: int) -> SwarmRun:
    """So many steps of a swarm.

    Raises:
        MeshwrightError: O008 where the last peer of a stage is lost, and its parameters with it.
    """
    return _Clock(sizes, decider, world).run(num_steps)


class _Clock:
    def __init__(self, sizes: SwarmSizes, decider: Swarm, world: SwarmWorld):
        self.sizes, self.decider, self.world = sizes, decider, world
        self.heap: list[tuple[float, int, Callable[[], SwarmEvent | None]]] = []
        self.order = count()
        peers = len(sizes.message_s)
        self.now_s = 0.0
        self.lives = [0] * peers  # how often each was lost: what it was at then never ends
        self.free = {port: [0.0] * peers for port in ("in", "compute", "out")}
        self.stage: list[int] = list(decider.stage_of)
        self.sums = self.moved = self.lost = self.joined = self.again = self.messages = 0
        self.passes, self.busy_s = [0] * peers, [0.0] * peers
        self.used_s = {"sum": 0.0, "update": 0.0}
        self.failures = iter(world.failures)
        self.left = world.spares
        self.rng = np.random.default_rng((world.seed, 7))
        self.log: list[LogEntry] = []
        self.ended_s: list[float] = []
        self.spans: list[PeerSpan] = []  # of the step that is being simulated

    def run(self, num_steps: int) -> SwarmRun:
        self._fails_next()
        state, event = self.decider.begin(), StepBegun(0.0)
        while True:
            state, decisions = self.decider.decide(state, event)
            self.log.append(LogEntry(event, decisions, self.now_s))
            for decision in decisions:
                self._do(decision)
            event = self._next()
            if isinstance(event, StepBegun):
                self.ended_s.append(event.at_s)
                if len(self.ended_s) == num_steps:
                    return self._said()
                self.spans = []

    def _said(self) -> SwarmRun:
        steps, total = len(self.ended_s), self.now_s
        share = zip(self.passes, self.busy_s, self.stage)
        return SwarmRun(
            step_s=tuple(np.diff([0.0, *self.ended_s]).tolist()),
            peers=tuple(PeerShare(passes, busy / total if total else 0.0, stage) for passes, busy, stage in share),
            moved=self.moved,
            lost=self.lost,
            joined=self.joined,
            again=self.again,
            sum_s=self.used_s["sum"] / steps,
            update_s=self.used_s["update"] / steps,
            computing_s=sum(self.busy_s) / len(self.busy_s) / steps,
            sent_bytes=self.messages * self.sizes.message_bytes / steps,
            spans=tuple(sorted(self.spans, key=lambda one: (one.start_s, one.peer))),
            log=tuple(self.log),
        )

    def _span(
        self, peer: int, queue: str, kind: str, stage: int, microbatch: int, start_s: float, end_s: float
    ) -> None:
        """Note what a peer did in this step."""
        begun = self.ended_s[-1] if self.ended_s else 0.0
        if end_s > start_s:
            self.spans.append(PeerSpan(peer, queue, kind, stage, microbatch, start_s - begun, end_s - begun))

    def _at(self, at_s: float, happens: Callable[[], SwarmEvent | None]) -> None:
        heapq.heappush(self.heap, (at_s, next(self.order), happens))

    def _next(self) -> SwarmEvent:
        while True:
            at_s, _, happens = heapq.heappop(self.heap)
            self.now_s = max(self.now_s, at_s)
            event = happens()
            if event is not None:
                return event

    def _fails_next(self) -> None:
        """Have the world's next failure happen."""
        one = next(self.failures, None)
        if one is not None:
            self._at(one.at_s, lambda: self._fails(one))

    def _fails(self, one: WorldEvent) -> SwarmEvent | None:
        """A peer is lost: the one that the trace names, else those that are there in turn."""
        self._fails_next()
        there = [peer for peer, stage in enumerate(self.stage) if stage >= 0]
        peer = one.node if one.node >= 0 or not there else there[self.lost % len(there)]
        if peer not in there:
            return None
        self.lives[peer] += 1
        self.sums += 1  # one that it was at never ends
        self.stage[peer] = -1
        self.lost += 1
        back_s = one.back_s
        if back_s is None and (self.left is None or self.left > 0):
            self.left = None if self.left is None else self.left - 1
            back_s = self.now_s + self.world.restart_s
        elif back_s is None:
            back_s = self.now_s + self.world.repair_s
        self._at(back_s, lambda: self._joins(peer))
        return PeerLost(peer, self.now_s)

    def _joins(self, peer: int) -> SwarmEvent:
        self.joined += 1
        for port in self.free.values():
            port[peer] = self.now_s
        return PeerJoined(peer, self.now_s)

    def _while_there(self, peer: int, event: Callable[[], SwarmEvent]) -> Callable[[], SwarmEvent | None]:
        life = self.lives[peer]
        return lambda: event() if self.lives[peer] == life else None

    def _do(self, decision: SwarmDecision) -> None:
        match decision:
            case AskPeer(peer=peer, request=request):
                self._ask(peer, request)
            case TakeStage(peer=peer, stage=stage, source=source):
                self._take(peer, stage, source)
            case SumGradients(pools=pools):
                self._sum(pools)
            case UpdateStages():
                took = max(
                    self.sizes.update_s[peer][stage] * self.world.computing[peer]
                    for peer, stage in enumerate(self.stage)
                    if stage >= 0
                )
                self.used_s["update"] += took
                for peer, stage in enumerate(self.stage):
                    if stage >= 0:
                        own = self.sizes.update_s[peer][stage] * self.world.computing[peer]
                        self._span(peer, "compute", "optimizer", stage, -1, self.now_s, self.now_s + own)
                self._at(self.now_s + took, lambda: StepBegun(self.now_s))
            case StageLost(stage=stage):
                raise MeshwrightError.one(
                    "O008",
                    f"at {self.now_s:.4g} s the last peer of stage {stage} is lost, and its parameters with it",
                    place="--world",
                    help="more peers a stage (dp), fewer failures, or rebalance= with a shorter time",
                )

    def _ask(self, peer: int, request: Request) -> None:
        """A request goes to a peer, is computed when what came before it is, and its answer comes back."""
        sizes, world, free = self.sizes, self.world, self.free
        into, out = sizes.messages(request)
        self.again += request.again
        message_s = sizes.message_s[peer] * world.sending[peer]
        free["in"][peer] = arrived = max(self.now_s, free["in"][peer]) + into * message_s
        one = sizes.backward_s if request.backward else sizes.forward_s
        took = one[peer][request.stage] + (into + out) * sizes.code_s
        took *= world.computing[peer] * (1.0 if world.jitter == ALIKE else world.jitter.draw(self.rng, peer))
        free["compute"][peer] = computed = max(arrived, free["compute"][peer]) + took
        free["out"][peer] = ends = max(computed, free["out"][peer]) + out * message_s

        def done() -> SwarmEvent:
            self.passes[peer] += 1
            self.busy_s[peer] += took
            self.messages += into + out
            m, s = request.microbatch, request.stage
            self._span(peer, IN, "send", s, m, arrived - into * message_s, arrived)
            self._span(peer, "compute", "BW" if request.backward else "F", s, m, computed - took, computed)
            self._span(peer, OUT[request.backward], "send", s, m, ends - out * message_s, ends)
            return PassDone(peer, request, self.now_s)

        self._at(ends, self._while_there(peer, done))

    def _take(self, peer: int, stage: int, source: int) -> None:
        """A peer copies the state of a stage from another."""
        if self.stage[peer] >= 0:
            self.moved += 1
        self.stage[peer] = stage
        took = self.sizes.state_s[stage] * max(self.world.sending[peer], self.world.sending[source])
        ends = max(self.now_s, self.free["out"][source], self.free["in"][peer]) + took
        self.free["out"][source] = self.free["in"][peer] = ends
        there = self._while_there(source, lambda: PeerReady(peer, self.now_s))
        self._at(ends, self._while_there(peer, there))

    def _sum(self, pools: tuple[tuple[int, ...], ...]) -> None:
        """The pools sum their gradients beside each other; a sum that somebody left is made anew."""
        self.sums += 1
        number = self.sums
        took = max(
            self.sizes.sum_s[stage][len(pool)] * max(self.world.sending[peer] for peer in pool)
            for stage, pool in enumerate(pools)
        )

        def summed() -> SwarmEvent | None:
            if number != self.sums:
                return None
            self.used_s["sum"] += took
            for stage, pool in enumerate(pools):
                for peer in pool:
                    self._span(peer, "dp", "all_reduce", stage, -1, self.now_s - took, self.now_s)
            return GradientsSummed(self.now_s)

        self._at(self.now_s + took, summed)
