"""Anchors and miners: some clients of a sample send the gradient of a large batch, the others steps that it corrects
(FedAMD, Wu et al. 2206.05891).

The server keeps the last large gradient of every client; their mean is the direction that miners begin along, with
each step corrected by how their small batch's gradient has changed since the step before (as SARAH's). All clients are
anchors once before the first round. A client of a sample is an anchor by chance, or all are once in so many rounds.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.sync.clients import (
    Answered,
    Begun,
    ClientDecision,
    ClientEvent,
    Keep,
    Left,
    Merge,
    Portion,
    TrainOn,
    sampled,
)


class AnchorState(msgspec.Struct, frozen=True):
    """The round's number, its anchors, clients still at work, and those whose work arrived."""

    number: int = -1
    anchors: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    arrived: tuple[int, ...] = ()


class Anchors(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: of a ``sample`` of ``num_clients`` each is an anchor by a chance of ``share``, or, where ``period``
    is not 0, all are in one of so many rounds; anchors' batches are ``large`` times as large, miners take ``steps``,
    and ``rate`` is that of the server's step along their mean change."""

    num_clients: int
    sample: int
    steps: int
    large: int
    share: float
    period: int
    rate: float
    seed: int = 0

    def begin(self) -> AnchorState:
        return AnchorState()

    def decide(self, state: AnchorState, event: ClientEvent) -> tuple[AnchorState, tuple[ClientDecision, ...]]:
        match event:
            case Begun():
                every = tuple(range(self.num_clients))
                return self._given(0, every, frozenset(every))
            case Answered(client=client, task=task) if task == state.number and client in state.waiting:
                state = msgspec.structs.replace(
                    state, waiting=state.waiting - {client}, arrived=(*state.arrived, client)
                )
            case Left(client=client, task=task) if task == state.number and client in state.waiting:
                state = msgspec.structs.replace(state, waiting=state.waiting - {client})
            case _:
                return state, ()
        return (state, ()) if state.waiting else self._closed(state)

    def _closed(self, state: AnchorState) -> tuple[AnchorState, tuple[ClientDecision, ...]]:
        """The mean of what miners changed, the gradients of anchors, and the next round."""
        miners = sorted(set(state.arrived) - state.anchors)
        anchors = sorted(set(state.arrived) & state.anchors)
        share = self.rate / len(miners) if miners else 0.0
        done: list[ClientDecision] = []
        if miners:
            done.append(Merge(tuple(Portion(client, state.number, share) for client in miners)))
        if anchors:
            done.append(Keep(tuple(Portion(client, state.number, 1.0) for client in anchors)))
        number = state.number + 1
        chosen = sampled(self.num_clients, self.sample, self.seed, number)
        after, begun = self._given(number, chosen, self.anchors(number, chosen))
        return after, (*done, *begun)

    def anchors(self, number: int, chosen: tuple[int, ...]) -> frozenset[int]:
        """The anchors of a round after the first, among those that were chosen for it."""
        if self.period:
            return frozenset(chosen if number % self.period == 0 else ())
        drawn = np.random.default_rng((self.seed, number, 1)).random(len(chosen))
        return frozenset(client for client, one in zip(chosen, drawn.tolist()) if one < self.share)

    def _given(
        self, number: int, chosen: tuple[int, ...], anchors: frozenset[int]
    ) -> tuple[AnchorState, tuple[ClientDecision, ...]]:
        tasks = (
            TrainOn(client, number, 1, passes=self.large, anchor=True)
            if client in anchors
            else TrainOn(client, number, self.steps, passes=2, directed=True)
            for client in chosen
        )
        return AnchorState(number, anchors, frozenset(chosen)), tuple(tasks)
