"""Decider: a pure state machine, ``decide(state, event) -> (state, decisions)``, and the log by which it replays.

A driver tells a decider what happened and does what it decides; the decider knows no clock and does nothing itself, so
that a simulation and a real run are decided by the same code. A log holds the events and decisions of one job in
order; whoever replays the events through the decider gets the same decisions (dask's stimulus log is the idea).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

State = TypeVar("State")
Event = TypeVar("Event")
Decision = TypeVar("Decision")


class Decider(Protocol[State, Event, Decision]):
    """A decider: the state it begins in, and the next state with decisions for every event."""

    def begin(self) -> State:
        """The state before anything happened."""

    def decide(self, state: State, event: Event) -> tuple[State, tuple[Decision, ...]]:
        """The state after `event`, and what is to be done."""


class LogEntry(msgspec.Struct, frozen=True):
    """One line of a log: what happened, what was decided, and when, in seconds from the beginning of the job."""

    event: msgspec.Struct
    decisions: tuple[msgspec.Struct, ...]
    at_s: float = 0.0


def replayed(decider: Decider, log: Iterable[LogEntry]) -> list[LogEntry]:
    """The log as the decider writes it when it is told the same events again."""
    state, out = decider.begin(), []
    for entry in log:
        state, decisions = decider.decide(state, entry.event)
        out.append(LogEntry(entry.event, decisions, entry.at_s))
    return out
