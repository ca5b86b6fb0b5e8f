"""Whoever trains with a swarm of peers: the real clock of the decider of ``world/swarm.py``, and a trainer whose steps
peers take.

It starts the peers, keeps what went into each stage until the step is done, and passes on what they make. It holds the
whole model besides, which is filled from the peers where it is saved or judged.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.run.data import Batch, Corpus
from meshwright.run.job import Job
from meshwright.run.result import StepResult
from meshwright.run.swarm.crowd import PeerProcesses
from meshwright.run.swarm.living import live
from meshwright.run.swarm.parcels import (
    BeginStep,
    DoPass,
    GiveState,
    HoldStage,
    LeaveSwarm,
    PassMade,
    PeerFailed,
    StageHeld,
    State,
    Summed,
    SumOver,
    Update,
    Updated,
    Word,
)
from meshwright.run.swarm.peer import StagePeer
from meshwright.run.swarm.stage import fill, state_of
from meshwright.run.trainer import Trainer
from meshwright.run.world import died
from meshwright.simulate.swarm import SwarmWorld
from meshwright.sync.codecs import codec
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

#: A sum that fails though nobody has died is given up after so long.
SUM_PATIENCE_S = 60.0


class Swarmed:
    """The peers of a job at work: :meth:`step` has them take one step. To be closed."""

    def __init__(self, job: Job, decider: Swarm, world: SwarmWorld, whole: Trainer, corpus: Corpus):
        self.job, self.decider, self.whole = job, decider, whole
        self.crowd = PeerProcesses(world, live, (partial(StagePeer, job=job, corpus=corpus),), Word, self)
        self.folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        self.stage_of = dict(enumerate(decider.stage_of))
        self.step_count = whole.step_count
        message = whole.hidden_states()
        self.message_bytes = codec(job.plan.passes.swarm.code).wire_bytes(message.numel(), message.itemsize)
        self.events: deque[SwarmEvent] = deque()
        self.log: list[LogEntry] = []
        self.state = decider.begin()
        # of a step: what went into stages, gradients of what came out, the loss of every microbatch, what is asked
        self.entered: dict[tuple[int, int], bytes] = {}
        self.returned: dict[tuple[int, int], bytes] = {}
        self.losses: dict[int, float] = {}
        self.asked: dict[tuple[int, int], Request] = {}
        self.numbers = 0
        self.sums, self.summing, self.squares, self.failed_at = 0, (), {}, 0.0
        self.updating: set[int] = set()
        self.states: dict[int, bytes] = {}  # of stages, as they are asked for
        self.holding: set[int] = set()
        self.peak_bytes: dict[int, int] = defaultdict(int)
        # of the run: seconds of passes by stage and way, of sums and updates, bytes, and what happened
        self.seconds: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self.sum_s: list[float] = []
        self.update_s: list[float] = []
        self.passes: dict[int, int] = defaultdict(int)
        self.sent_bytes = self.moved = self.again = 0
        state = state_of(whole.pieces())  # of which every peer takes what is its stage's
        for number, stage in enumerate(decider.stage_of):
            self.crowd.start(number)
            self.crowd.order(number, HoldStage(stage=stage, step=self.step_count), state)
        while len(self.holding) < len(decider.stage_of):
            self._hear(0.5)
            if self.events:
                raise died(self.events[0].peer, "this host", "it ended before it held its stage")

    def now(self) -> float:
        """Seconds since the peers were started."""
        return self.crowd.now()

    # -- a step

    def step(self) -> tuple[float, float]:
        """Have the peers take a step; its loss and the length of its gradient. One that is not finite is not applied.

        Raises:
            RankDied: L001 where the last peer of a stage has died.
        """
        self.entered, self.returned, self.losses = {}, {}, {}
        for number in self.crowd.peers:
            if self.stage_of[number] >= 0:
                self.crowd.order(number, BeginStep(self.step_count))
        self.crowd.begins()
        self.events.append(StepBegun(self.now()))
        norm: float | None = None
        while norm is None or self.updating:
            while self.events:
                event = self.events.popleft()
                self.state, decisions = self.decider.decide(self.state, event)
                self.log.append(LogEntry(event, decisions, self.now()))
                for decision in decisions:
                    if isinstance(decision, UpdateStages):
                        norm = self._update()
                    else:
                        self._do(decision)
            if norm is None or self.updating:
                self._hear()
        loss = sum(self.losses.values())
        self.step_count += _finite(loss, norm)
        return loss, norm

    def _do(self, decision: SwarmDecision) -> None:
        match decision:
            case AskPeer(peer=number, request=request):
                self._ask(number, request)
            case TakeStage(peer=number, stage=stage, source=source):
                self.moved += self.stage_of[number] >= 0
                self.stage_of[number] = stage
                self.crowd.order(source, GiveState(number))
            case SumGradients(pools=pools):
                self._sum(pools)
            case StageLost(stage=stage):
                raise died(0, "this host", f"the last peer of stage {stage} is gone, and its parameters with it",
                           "more peers a stage (dp); --resume goes on from the last checkpoint")  # fmt: skip

    def _ask(self, number: int, request: Request) -> None:
        self.numbers += 1
        self.asked[number, self.numbers] = request
        self.again += request.again
        at = request.microbatch, request.stage
        body = self.entered.get(at, b"") + (self.returned.get(at, b"") if request.backward else b"")
        self.sent_bytes += len(body)
        self.crowd.order(number, DoPass(self.numbers, request.microbatch, request.backward), body)

    def _computed(self, number: int, word: PassMade, made: bytes) -> None:
        request = self.asked.pop((number, word.number))
        m, stage = request.microbatch, request.stage
        if request.backward:
            self.returned[m, stage - 1] = made
        elif stage + 1 < self.decider.stages:
            self.entered[m, stage + 1] = made
        else:
            self.losses[m] = word.loss
        self.sent_bytes += len(made)
        self.passes[number] += 1
        self.seconds[stage, request.backward].append(word.seconds)
        self.events.append(PassDone(number, request, self.now()))

    def _sum(self, pools: tuple[tuple[int, ...], ...]) -> None:
        """Have the peers of every stage meet and sum; those that have met before meet where they did."""
        self.sums += 1
        self.summing, self.squares, self.failed_at = pools, {}, 0.0
        if any(number not in self.crowd.peers for pool in pools for number in pool):
            return  # what is done about that is decided next
        for pool in pools:
            met = "-".join(f"{number}.{self.crowd.peers[number].life}" for number in pool)
            store = str(Path(self.folder.name) / f"sum-{met}")
            for index, number in enumerate(pool):
                self.crowd.order(number, SumOver(self.sums, index, len(pool), store))

    def _summed(self, number: int, word: Summed) -> None:
        if word.number != self.sums:
            return
        if word.cause:
            self.failed_at = self.failed_at or self.now()
            return
        self.squares[number] = word.square
        if len(self.squares) == sum(map(len, self.summing)):
            self.sum_s.append(word.seconds)
            self.events.append(GradientsSummed(self.now()))

    def _update(self) -> float:
        """Have all peers apply the sum, if it is finite; how long it is."""
        norm = sum(self.squares[pool[0]] for pool in self.summing) ** 0.5
        if _finite(sum(self.losses.values()), norm):
            self.updating = {number for pool in self.summing for number in pool if number in self.crowd.peers}
            for number in self.updating:
                self.crowd.order(number, Update(norm))
        return norm

    # -- peers

    def _hear(self, most_s: float = 0.5) -> None:
        """Take up what peers say, that one has died, and what the world says."""
        self.crowd.hear(most_s)
        if self.failed_at and self.now() > self.failed_at + SUM_PATIENCE_S:
            raise died(0, "this host", "peers cannot sum their gradients, and none of them has died")

    def told(self, number: int, word: Word, body: bytes) -> None:
        """A peer says something."""
        match word:
            case PassMade():
                self._computed(number, word, body)
            case Summed():
                self._summed(number, word)
            case Updated(seconds=seconds, peak_bytes=peak_bytes):
                self.update_s.append(seconds)
                self.peak_bytes[number] = peak_bytes
                self.updating.discard(number)
            case StageHeld():
                self.holding.add(number)
                if self.crowd.first_step_at is not None:
                    self.events.append(PeerReady(number, self.now()))
            case State(taker=taker):
                if taker < 0:
                    self.states[self.stage_of[number]] = body
                else:
                    self.crowd.order(taker, HoldStage(stage=self.stage_of[taker], step=self.step_count), body)
            case PeerFailed(report=report):
                if report.diagnostics:
                    raise MeshwrightError(report.diagnostics)
                raise died(number, "this host", report.cause)

    def gone(self, number: int) -> None:
        """A peer has died: the decider is told."""
        self.stage_of[number] = -1
        self.updating.discard(number)
        self.failed_at = 0.0
        self.sums += 1  # one that it was at never ends
        self.asked = {key: request for key, request in self.asked.items() if key[0] != number}
        self.events.append(PeerLost(number, self.now()))
        if not self.job.quiet:
            print(f"lost peer {number} in step {self.step_count + 1:,}", file=sys.stderr)

    def may_join(self) -> bool:
        """Nobody takes a number whose loss the decider has not been told of: it would be asked what another was to
        do."""
        return not self.events

    def joined(self, number: int) -> None:
        """A peer is there: the decider is told."""
        self.events.append(PeerJoined(number, self.now()))

    # -- the whole model

    def gather(self) -> None:
        """Fill the whole model from one peer of each stage, between two steps."""
        self.states, sources = {}, {}
        while len(self.states) < self.decider.stages:
            for stage in set(range(self.decider.stages)) - self.states.keys():
                pool = [number for number in self.crowd.peers if self.stage_of[number] == stage]
                if not pool:
                    self._do(StageLost(stage))
                if sources.get(stage) not in self.crowd.peers:
                    sources[stage] = pool[0]
                    self.crowd.order(pool[0], GiveState(-1))
            self._hear()
        for state in self.states.values():
            fill(self.whole.pieces(), state)
        self.whole.set_step(self.step_count)
        self.whole.settle()

    def close(self) -> None:
        """End all peers."""
        self.crowd.close(LeaveSwarm())
        self.folder.cleanup()


class SwarmTrainer:
    """A trainer whose steps the peers of a swarm take: the ``whole`` model's, but for them. What it holds is as it was
    before them until it is asked for."""

    def __init__(self, whole: Trainer, swarm: Swarmed):
        self._whole, self._swarm = whole, swarm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def step(self, batch: Batch, following: Batch | None = None) -> StepResult:
        """One optimizer step; what follows tells a swarm nothing."""
        for wait_for in self._whole.before_update:
            wait_for()
        loss, norm = self._swarm.step()
        finite = _finite(loss, norm)
        self._whole.step_count = self._swarm.step_count
        return StepResult(loss, batch.num_targets or self._whole.train.tokens_per_step, norm, finite)

    def pieces(self, *, shared: bool = False) -> Iterable[Any]:
        """Parameters and moments, as the peers hold them."""
        self._swarm.gather()
        return self._whole.pieces(shared=shared)

    def settle(self) -> None:
        """Hold what the peers hold."""
        self._swarm.gather()


def _finite(loss: float, norm: float) -> bool:
    return loss == loss and norm == norm and abs(loss) != float("inf") and norm != float("inf")
