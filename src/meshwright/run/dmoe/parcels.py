"""Words between whoever trains and a peer that has experts; what comes along are bytes of rows or of state."""

from __future__ import annotations

import msgspec

from meshwright.run.swarm.parcels import LeaveSwarm, PeerFailed


class HoldExperts(msgspec.Struct, frozen=True, tag=True):
    """To a peer: hold the experts that are the ``index``-th share of every mixture's, after so many ``updates``; their
    state comes along."""

    index: int
    updates: int


class PassExperts(msgspec.Struct, frozen=True, tag=True):
    """To a peer: pass the rows that come along through the experts of a layer, each of which gets as many as ``counts``
    says; in a backward the gradients of what they made follow, and the experts take a step at once, with the learning
    rate of this ``step``."""

    number: int
    layer: int
    counts: list[int]
    backward: bool
    step: int


class GiveExperts(msgspec.Struct, frozen=True, tag=True):
    """To a peer: send the state of your experts."""


class ExpertsHeld(msgspec.Struct, frozen=True, tag=True):
    """From a peer: it holds its experts."""


class RowsMade(msgspec.Struct, frozen=True, tag=True):
    """From a peer: a pass is done, in so many seconds of its own; rows, or their gradients, come along. ``update_s``:
    seconds of the step that its experts took last."""

    number: int
    seconds: float
    update_s: float
    peak_bytes: int


class ExpertState(msgspec.Struct, frozen=True, tag=True):
    """From a peer: the state of its experts, which comes along."""


Order = HoldExperts | PassExperts | GiveExperts | LeaveSwarm
Word = ExpertsHeld | RowsMade | ExpertState | PeerFailed
