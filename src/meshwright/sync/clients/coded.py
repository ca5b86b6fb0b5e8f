"""Gradient coding: every client computes several parts of a batch and sends one sum of them with weights of its own, so
that the sum over all parts is had from any of those who answer, but for a few (Tandon et al. 1612.03301).

Where clients divide into groups of ``extra + 1``, a group has the same parts and one of it is enough (fractional
repetition). Else parts go around: a client has its own and the next ones, with weights that are orthogonal to a random
matrix whose rows add up to nothing (cyclic repetition). Where more are missing than the code makes up for, tasks that
were not done are given again before the next step begins, as in sequential gradient coding (SR-SGC, Krishnan et al.
2211.13802), of which this is the case of one model and no delay.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from meshwright.sync.clients import Answered, Begun, ClientDecision, ClientEvent, Left, Merge, Portion, TrainOn

#: Times that a step's tasks may be given; tasks of the next are numbered from there on.
ATTEMPTS = 64
#: How far what is decoded may be from one of every part.
CLOSE = 1e-9


def step_of(task: int) -> int:
    """Return the step that a task is of, counted from 0."""
    return task // ATTEMPTS


def parts_of(client: int, num_clients: int, extra: int) -> tuple[int, ...]:
    """Return the parts of a batch, of as many as there are clients, that a client computes."""
    if num_clients % (extra + 1) == 0:
        first = client // (extra + 1) * (extra + 1)
        return tuple(range(first, first + extra + 1))
    return tuple((client + place) % num_clients for place in range(extra + 1))


@lru_cache(maxsize=16)
def weights(num_clients: int, extra: int) -> np.ndarray:
    """Return the weight of each part in what each client sends, [clients, parts], 0 of those it has not."""
    out = np.zeros((num_clients, num_clients))
    if num_clients % (extra + 1) == 0:
        for client in range(num_clients):
            out[client, list(parts_of(client, num_clients, extra))] = 1.0
        return out
    draw = np.random.default_rng((num_clients, extra)).standard_normal((extra, num_clients - 1))
    rows = np.hstack((draw, -draw.sum(1, keepdims=True)))  # every row adds up to nothing
    for client in range(num_clients):
        own, *others = parts_of(client, num_clients, extra)
        out[client, own] = 1.0
        out[client, others] = -np.linalg.solve(rows[:, others], rows[:, own])
    return out


def shares(answered: tuple[int, ...], num_clients: int, extra: int) -> dict[int, float] | None:
    """Return the share of each client's sum in that of all parts; None where it cannot be had of these."""
    if not answered:
        return None
    rows = weights(num_clients, extra)[list(answered)]
    if num_clients % (extra + 1) == 0:
        firsts = {client // (extra + 1): client for client in reversed(answered)}
        return dict.fromkeys(sorted(firsts.values()), 1.0) if len(firsts) == num_clients // (extra + 1) else None
    found = np.linalg.lstsq(rows.T, np.ones(num_clients), rcond=None)[0]
    if np.abs(found @ rows - 1).max() > CLOSE:
        return None
    return dict(zip(answered, found.tolist()))


class CodedState(msgspec.Struct, frozen=True):
    """The step and the attempt at it, clients at work, those whose sum arrived with their tasks, and those who left."""

    step: int = -1
    attempt: int = 0
    waiting: frozenset[int] = frozenset()
    arrived: tuple[tuple[int, int], ...] = ()


class Coded(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: ``extra`` of ``num_clients`` may be missing from a step of all."""

    num_clients: int
    extra: int

    def begin(self) -> CodedState:
        return CodedState()

    def decide(self, state: CodedState, event: ClientEvent) -> tuple[CodedState, tuple[ClientDecision, ...]]:
        match event:
            case Begun():
                return self._next(0)
            case Answered(client=client, task=task) if self._awaited(state, client, task):
                arrived = (*state.arrived, (client, task))
                state = msgspec.structs.replace(state, waiting=state.waiting - {client}, arrived=arrived)
            case Left(client=client, task=task) if self._awaited(state, client, task):
                state = msgspec.structs.replace(state, waiting=state.waiting - {client})
            case _:
                return state, ()
        tasks = dict(state.arrived)
        found = shares(tuple(sorted(tasks)), self.num_clients, self.extra)
        if found is not None:
            parts = tuple(Portion(c, task, found.get(c, 0.0)) for c, task in sorted(tasks.items()))
            after, begun = self._next(state.step + 1)
            return after, (Merge(parts, self.num_clients), *begun)
        if state.waiting:
            return state, ()
        again = frozenset(range(self.num_clients)) - set(tasks)
        state = msgspec.structs.replace(state, attempt=state.attempt + 1, waiting=again)
        return state, self._given(state) if state.attempt < ATTEMPTS else ()

    def _awaited(self, state: CodedState, client: int, task: int) -> bool:
        return client in state.waiting and step_of(task) == state.step

    def _next(self, step: int) -> tuple[CodedState, tuple[ClientDecision, ...]]:
        state = CodedState(step, 0, frozenset(range(self.num_clients)))
        return state, self._given(state)

    def _given(self, state: CodedState) -> tuple[ClientDecision, ...]:
        task = state.step * ATTEMPTS + state.attempt
        return tuple(TrainOn(client, task, 1) for client in sorted(state.waiting))
