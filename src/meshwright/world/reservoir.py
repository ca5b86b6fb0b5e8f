"""The reservoir of a training rank: the decider of which samples of a stream are kept, and which a batch takes.

Producers (solvers of an ensemble) stream samples into a buffer of bounded room, and batches are drawn from all that are
in it, seen or not, so that training waits for nobody once there are enough (Meyer et al., "High Throughput Training of
Deep Surrogates from Large Ensemble Runs", SC 2023, 2309.16743). Where it is full a new sample takes the place of one
that was trained on, drawn at random; where all are unseen its producer waits, and nothing unseen is ever lost. When no
more come, what is drawn leaves, until nothing is left.
"""

from __future__ import annotations

import msgspec

_MASK = (1 << 64) - 1


class SampleCame(msgspec.Struct, frozen=True, tag=True):
    """A producer brings a sample."""

    sample: int


class BatchAsked(msgspec.Struct, frozen=True, tag=True):
    """A step wants so many samples."""

    count: int


class ProducersEnded(msgspec.Struct, frozen=True, tag=True):
    """No more samples come."""


class KeepSample(msgspec.Struct, frozen=True, tag=True):
    """Keep a sample, in the place of one that was ``dropped`` (-1: of none)."""

    sample: int
    dropped: int = -1


class HoldSample(msgspec.Struct, frozen=True, tag=True):
    """There is no room: whoever brings the sample waits."""

    sample: int


class GiveBatch(msgspec.Struct, frozen=True, tag=True):
    """Train on these samples, of which ``fresh`` were never trained on."""

    samples: tuple[int, ...]
    fresh: int


class ReservoirState(msgspec.Struct):
    """Samples that were not trained on (``unseen``) and that were (``seen``), those whose producers wait (``held``),
    how many a step waits for (``asked``), whether all have come (``over``) and how many random numbers were drawn."""

    unseen: list[int] = msgspec.field(default_factory=list)
    seen: list[int] = msgspec.field(default_factory=list)
    held: list[int] = msgspec.field(default_factory=list)
    asked: int = 0
    over: bool = False
    draws: int = 0


class ReservoirControl(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: ``room`` for so many samples, none of which is given before there are more than ``threshold``."""

    room: int
    threshold: int = 0
    seed: int = 0

    def begin(self) -> ReservoirState:
        """The state before anything happened."""
        return ReservoirState()

    def decide(
        self, state: ReservoirState, event: SampleCame | BatchAsked | ProducersEnded
    ) -> tuple[ReservoirState, tuple[KeepSample | HoldSample | GiveBatch, ...]]:
        """The state after an event, and what is to be done."""
        found: list[KeepSample | HoldSample | GiveBatch] = []
        match event:
            case SampleCame(sample=sample):
                found.append(self._kept(state, sample) or HoldSample(sample))
                if isinstance(found[-1], HoldSample):
                    state.held.append(sample)
            case BatchAsked(count=count):
                state.asked = count
            case ProducersEnded():
                state.over = True
        if state.asked and self._enough(state):
            found.append(self._given(state))
            while state.held and (kept := self._kept(state, state.held[0])) is not None:
                state.held.pop(0)
                found.append(kept)
        return state, tuple(found)

    def _enough(self, state: ReservoirState) -> bool:
        there = len(state.unseen) + len(state.seen)
        return there > 0 if state.over else there > min(self.threshold, self.room - 1)

    def _kept(self, state: ReservoirState, sample: int) -> KeepSample | None:
        dropped = -1
        if len(state.unseen) + len(state.seen) >= self.room:
            if not state.seen:
                return None
            dropped = _taken(state.seen, self._below(state, len(state.seen)))
        state.unseen.append(sample)
        return KeepSample(sample, dropped)

    def _given(self, state: ReservoirState) -> GiveBatch:
        batch, fresh = [], 0
        while len(batch) < state.asked and (there := len(state.unseen) + len(state.seen)):
            at = self._below(state, there)
            if at < len(state.unseen):
                batch.append(_taken(state.unseen, at))
                fresh += 1
                if not state.over:
                    state.seen.append(batch[-1])
            else:
                at -= len(state.unseen)
                batch.append(_taken(state.seen, at) if state.over else state.seen[at])
        state.asked = 0
        return GiveBatch(tuple(batch), fresh)

    def _below(self, state: ReservoirState, count: int) -> int:
        """A number below `count`, by the finaliser of SplitMix64 over the seed and the number of draws."""
        state.draws += 1
        value = (state.draws * 0x9E3779B97F4A7C15 + self.seed) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((value ^ (value >> 31)) * count) >> 64


def _taken(some: list[int], at: int) -> int:
    """Take the one at a place out of a list whose order does not matter."""
    some[at], some[-1] = some[-1], some[at]
    return some.pop()
