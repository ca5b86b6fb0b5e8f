"""Swarm: the decider of a pipeline whose stages are pools of unequal peers that come and go (SWARM parallelism,
Ryabinin et al. 2023, arXiv 2301.11913).

Every pass of a microbatch through a stage is a request. Whoever trains (a *trainer*, which needs no device) keeps what
went into each stage, asks a peer of the first, gives its answer to a peer of the second, and so on and back; a backward
brings a stage's input and the gradient of its output, and the peer computes the forward again. So a peer holds nothing
of a microbatch between two requests, and any peer of the stage may be asked. Which one is interleaved weighted round
robin over measured speeds: of each peer the time of what it was asked is counted, as long as such requests took it,
and the one with the least is next.

A peer that is lost takes back what it was asked and the gradients that it had summed in the step: both are asked of
others, so that a step's gradient stays that of its batch. One that joins goes where most is waited for. Once in
``rebalance_s`` a peer of the stage that is waited for least goes over to that which is waited for most, where the
slowest stage gets faster by it. Times come with the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import msgspec

#: A backward request against a forward one, and the weight of the last request in a peer's measured speed: those of the
#: authors' published code.
BACKWARD, LATEST = 2.5, 0.1


class Request(msgspec.Struct, frozen=True):
    """A pass of a microbatch through a stage; ``again``: its gradients were summed by a peer that is lost, and nothing
    follows from it."""

    microbatch: int
    stage: int
    backward: bool = False
    again: bool = False

    @property
    def size(self) -> float:
        """The work of the request, in forwards."""
        return BACKWARD if self.backward else 1.0


class StepBegun(msgspec.Struct, frozen=True, tag=True):
    """A step begins: all peers hold the same parameters of their stages."""

    at_s: float


class PassDone(msgspec.Struct, frozen=True, tag=True):
    """A peer has answered a request."""

    peer: int
    request: Request
    at_s: float


class PeerLost(msgspec.Struct, frozen=True, tag=True):
    """A peer is gone, with all that it held."""

    peer: int
    at_s: float


class PeerJoined(msgspec.Struct, frozen=True, tag=True):
    """A peer is there, and holds nothing."""

    peer: int
    at_s: float


class PeerReady(msgspec.Struct, frozen=True, tag=True):
    """A peer holds the state of the stage that it was told to take."""

    peer: int
    at_s: float


class GradientsSummed(msgspec.Struct, frozen=True, tag=True):
    """The peers of every stage have the sum of their gradients."""

    at_s: float


class AskPeer(msgspec.Struct, frozen=True, tag=True):
    """A peer is asked for a pass."""

    peer: int
    request: Request


class TakeStage(msgspec.Struct, frozen=True, tag=True):
    """A peer takes a stage: it copies the state that the peer ``source`` holds."""

    peer: int
    stage: int
    source: int


class SumGradients(msgspec.Struct, frozen=True, tag=True):
    """The peers of each stage sum their gradients: ``pools`` are their numbers, stage by stage. One that is told anew
    takes the place of the last."""

    pools: tuple[tuple[int, ...], ...]


class UpdateStages(msgspec.Struct, frozen=True, tag=True):
    """All peers update their parameters: the step is done."""


class StageLost(msgspec.Struct, frozen=True, tag=True):
    """No peer holds the parameters of a stage any more: training cannot go on."""

    stage: int


SwarmEvent = StepBegun | PassDone | PeerLost | PeerJoined | PeerReady | GradientsSummed
SwarmDecision = AskPeer | TakeStage | SumGradients | UpdateStages | StageLost


class SwarmPeer(msgspec.Struct, frozen=True):
    """A peer as the decider knows it: its ``stage``, whether it is ``usable`` there, the seconds ``counted`` of what
    it was asked, the mean seconds of a forward that it took (``mean_s``, a running mean of ``answers``), when it last
    answered, what it is ``asked`` and since when, and the backwards whose gradients it holds. ``source``: the peer that
    it copies its stage from while it is not usable."""

    stage: int
    usable: bool = True
    source: int = -1
    counted: float = 0.0
    mean_s: float = 0.0
    answers: int = 0
    last_s: float = 0.0
    asked: tuple[tuple[Request, float], ...] = ()
    holds: tuple[Request, ...] = ()

    @property
    def forward_s(self) -> float:
        """Seconds of a forward as they were measured; 0 before any was."""
        return self.mean_s / (1 - (1 - LATEST) ** self.answers) if self.answers else 0.0


IDLE, PASSES, SUMS = "idle", "passes", "sums"


class SwarmState(msgspec.Struct, frozen=True):
    """How a swarm stands: its ``peers`` by number, None for one that is gone; what it is at; microbatches of the step
    that were begun, and those that are through; requests that find no peer yet, and peers that joined between two
    steps and have no stage yet; of each stage the requests that are out, and the seconds that they were so since the
    last look (``waited``), at ``looked_s``; and when ``waited`` was last counted."""

    peers: tuple[SwarmPeer | None, ...]
    at: str = IDLE
    begun: int = 0
    through: int = 0
    held_back: tuple[Request, ...] = ()
    joiners: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    waited: tuple[float, ...] = ()
    looked_s: float = 0.0
    counted_s: float = 0.0


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: ``stages`` of ``stage_of`` the peers that there are at the start, a step of ``microbatches``, of
    which ``trainers`` are under way at a time; a look at the balance of stages once in ``rebalance_s`` (0: never)."""

    stages: int
    stage_of: tuple[int, ...]
    microbatches: int
    trainers: int
    rebalance_s: float = 0.0

    def begin(self) -> SwarmState:
        """The state before anything happened."""
        zeros = (0,) * self.stages
        return SwarmState(tuple(map(SwarmPeer, self.stage_of)), out=zeros, waited=tuple(map(float, zeros)))

    def decide(self, state: SwarmState, event: SwarmEvent) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """Return the state after an event, and what is to be done."""
        state = _waited(state, event.at_s)
        match event:
            case StepBegun(at_s=now):
                state, moves = self._rebalanced(state, now)
                for number in state.joiners:
                    state, decided = self._placed(state, number, now)
                    moves += decided
                peers = tuple(None if p is None else msgspec.structs.replace(p, holds=()) for p in state.peers)
                first = min(self.trainers, self.microbatches)
                state = msgspec.structs.replace(state, peers=peers, at=PASSES, begun=first, through=0, joiners=())
                state, asked = _asked(state, [Request(m, 0) for m in range(first)], now)
                return state, (*moves, *asked)
            case PassDone(peer=number, request=request, at_s=now):
                return self._answered(state, number, request, now)
            case PeerLost(peer=number, at_s=now):
                return self._lost(state, number, now)
            case PeerJoined(peer=number, at_s=now):
                if state.at == PASSES:
                    return self._placed(state, number, now)
                return msgspec.structs.replace(state, joiners=(*state.joiners, number)), ()
            case PeerReady(peer=number, at_s=now):
                peer = msgspec.structs.replace(state.peers[number], usable=True, last_s=now)
                state = _with(state, number, peer)
                some, state = state.held_back, msgspec.structs.replace(state, held_back=())
                state, asked = _asked(state, some, now)
                return self._summed_next(state, asked)
            case GradientsSummed():
                return msgspec.structs.replace(state, at=IDLE), (UpdateStages(),)

    def _answered(
        self, state: SwarmState, number: int, request: Request, now: float
    ) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """A pass is done: the microbatch goes on, or the next one begins."""
        peer = state.peers[number]
        since = next(sent for one, sent in peer.asked if one == request)
        took = max(0.0, now - max(since, peer.last_s)) / request.size
        peer = msgspec.structs.replace(
            peer,
            mean_s=LATEST * took + (1 - LATEST) * peer.mean_s,
            answers=peer.answers + 1,
            last_s=now,
            asked=tuple(one for one in peer.asked if one[0] != request),
            holds=(*peer.holds, msgspec.structs.replace(request, again=False)) if request.backward else peer.holds,
        )
        out = _changed(state.out, request.stage, state.out[request.stage] - 1)
        state = msgspec.structs.replace(_with(state, number, peer), out=out)
        following: list[Request] = []
        if not request.again:
            m, s = request.microbatch, request.stage
            if not request.backward:
                following = [Request(m, s + 1) if s + 1 < self.stages else Request(m, s, backward=True)]
            elif s:
                following = [Request(m, s - 1, backward=True)]
            else:
                state = msgspec.structs.replace(state, through=state.through + 1)
                if state.begun < self.microbatches:
                    following = [Request(state.begun, 0)]
                    state = msgspec.structs.replace(state, begun=state.begun + 1)
        state, asked = _asked(state, following, now)
        return self._summed_next(state, asked)

    def _summed_next(
        self, state: SwarmState, decided: tuple[SwarmDecision, ...]
    ) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """Sum the gradients once all passes are done and everybody holds its stage."""
        busy = any(state.out) or state.held_back or state.through < self.microbatches
        if state.at != PASSES or busy or any(p is not None and not p.usable for p in state.peers):
            return state, decided
        pools = tuple(tuple(number for number, _ in _pool(state, stage)) for stage in range(self.stages))
        return msgspec.structs.replace(state, at=SUMS), (*decided, SumGradients(pools))

    def _lost(self, state: SwarmState, number: int, now: float) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """A peer is gone: what it was asked and the gradients that it held are asked of others."""
        state = msgspec.structs.replace(state, joiners=tuple(one for one in state.joiners if one != number))
        peer = state.peers[number] if number < len(state.peers) else None
        if peer is None:
            return state, ()
        state = _with(state, number, None)
        if peer.usable and not any(one.usable for _, one in _all(state, peer.stage)):
            return state, (StageLost(peer.stage),)
        out = _changed(state.out, peer.stage, state.out[peer.stage] - len(peer.asked))
        state = msgspec.structs.replace(state, out=out)
        anew: list[SwarmDecision] = []
        for taker, one in _all(state, peer.stage):
            if not one.usable and one.source == number:
                state, decided = self._takes(state, taker, peer.stage, now)
                anew += decided
        if state.at == IDLE:
            return state, tuple(anew)
        again = [msgspec.structs.replace(request, again=True) for request in peer.holds]
        state, asked = _asked(state, [*(request for request, _ in peer.asked), *again], now)
        return self._summed_next(msgspec.structs.replace(state, at=PASSES), (*anew, *asked))

    def _placed(self, state: SwarmState, number: int, now: float) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """A peer that joined takes the stage that is waited for most, for each peer that is there."""

        def waits(stage: int) -> float:
            return (state.waited[stage] + state.out[stage] * 1e-9) / len(_pool(state, stage))

        stage = max((s for s in range(self.stages) if _pool(state, s)), key=waits)
        if number >= len(state.peers):
            more = (None,) * (number + 1 - len(state.peers))
            state = msgspec.structs.replace(state, peers=(*state.peers, *more))
        return self._takes(state, number, stage, now)

    def _takes(
        self, state: SwarmState, number: int, stage: int, now: float
    ) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """A peer takes a stage; it is asked first of all there, so that its speed is known."""
        pool = _pool(state, stage)
        source = min(pool, key=lambda one: (len(one[1].asked), one[0]))[0]
        least = min(one.counted for _, one in pool)
        state = _with(state, number, SwarmPeer(stage, usable=False, source=source, counted=least, last_s=now))
        return state, (TakeStage(number, stage, source),)

    def _rebalanced(self, state: SwarmState, now: float) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
        """Between two steps, the peer that goes over to the stage that was waited for most, if one does."""
        if not self.rebalance_s or now - state.looked_s < self.rebalance_s:
            return state, ()
        waited = state.waited
        state = msgspec.structs.replace(state, waited=(0.0,) * self.stages, looked_s=now)
        rates = [[1 / p.forward_s for _, p in _pool(state, s) if p.forward_s] for s in range(self.stages)]
        most = max(range(self.stages), key=waited.__getitem__)
        richer = [s for s in range(self.stages) if s != most and len(_pool(state, s)) > 1 and rates[s]]
        if not richer or not all(rates):
            return state, ()
        least = min(richer, key=waited.__getitem__)
        sums = [sum(some) for some in rates]

        def slowest(peer: SwarmPeer) -> float:
            moved = 1 / peer.forward_s
            return min((rate - moved * (s == least) + moved * (s == most) for s, rate in enumerate(sums)))

        number, peer = max(((n, p) for n, p in _pool(state, least) if p.forward_s), key=lambda one: slowest(one[1]))
        if slowest(peer) <= min(sums) * (1 + 1e-9):
            return state, ()
        return self._takes(_with(state, number, None), number, most, now)


def _asked(state: SwarmState, requests: Iterable[Request], now: float) -> tuple[SwarmState, tuple[SwarmDecision, ...]]:
    """Ask for passes, each of the peer of its stage with the least time counted; those of a stage that all are still
    taking are held back."""
    decided: list[SwarmDecision] = []
    for request in requests:
        pool = _pool(state, request.stage)
        if not pool:
            state = msgspec.structs.replace(state, held_back=(*state.held_back, request))
            continue
        number, peer = min(pool, key=lambda one: (one[1].counted, one[0]))
        known = [one.forward_s for _, one in pool if one.forward_s]
        expected = request.size * (peer.forward_s or (fmean(known) if known else 1.0))
        peer = msgspec.structs.replace(peer, counted=peer.counted + expected, asked=(*peer.asked, (request, now)))
        out = _changed(state.out, request.stage, state.out[request.stage] + 1)
        state = msgspec.structs.replace(_with(state, number, peer), out=out)
        decided.append(AskPeer(number, request))
    return state, tuple(decided)


def _waited(state: SwarmState, now: float) -> SwarmState:
    """Count the time that requests were out until now."""
    past = max(0.0, now - state.counted_s)
    waited = tuple(seconds + past * count for seconds, count in zip(state.waited, state.out))
    return msgspec.structs.replace(state, waited=waited, counted_s=max(now, state.counted_s))


def _all(state: SwarmState, stage: int) -> list[tuple[int, SwarmPeer]]:
    return [(number, one) for number, one in enumerate(state.peers) if one is not None and one.stage == stage]


def _pool(state: SwarmState, stage: int) -> list[tuple[int, SwarmPeer]]:
    """The usable peers of a stage with their numbers."""
    return [one for one in _all(state, stage) if one[1].usable]


def _with(state: SwarmState, number: int, peer: SwarmPeer | None) -> SwarmState:
    return msgspec.structs.replace(state, peers=_changed(state.peers, number, peer))


def _changed(values: tuple, place: int, value: object) -> tuple:
    return (*values[:place], value, *values[place + 1 :])
