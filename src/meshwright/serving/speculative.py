"""Speculative decoding: tokens are guessed ahead and verified in one iteration (Leviathan et al., ICML 2023,
2211.17192).

A draft model (or n-grams of the prompt, which cost nothing) guesses some tokens one after the other; the model computes
all of them at once, keeps those that it would have said itself, and says one more. Answers are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from meshwright.serving.engine_request import EngineRequest


class GuessTimes(msgspec.Struct, frozen=True):
    """Seconds of a round: of one step of the draft model (``draft_s``), of the model on guesses of all sequences
    (``verify_s``) and of moving the cache of the whole batch once (``realign_s``). ``targets`` copies of the model
    verify at the same time."""

    draft_s: float
    verify_s: float
    realign_s: float = 0.0
    targets: int = 1


class SpeculationPolicy(Protocol):
    """A way to speculate: how many tokens are guessed of a sequence, and what a round takes.

    ``alone``: of one request at a time. ``endless``: the draft model does not wait for the verdict. ``even``: the
    guesses of a batch are one tensor, no longer than what its sequence nearest to its end may still say."""

    name: str
    title: str
    alone: bool
    endless: bool
    even: bool

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds of a round in which up to `drafted` tokens of each sequence were guessed and so many
        `accepted`."""


class Drafts(msgspec.Struct, frozen=True):
    """A fixed number of guesses for every sequence that decodes; ``even``: all guess as many as the one nearest to its
    end may."""

    name: str = "fixed"
    title: str = "as many guesses for every sequence"
    count: int = 4
    even: bool = False

    def guesses(self, one: EngineRequest, left: int) -> int:
        """Return the tokens to guess."""
        return min(self.count, max(left - 1, 1)) if self.even else self.count


class Speculative(msgspec.Struct, frozen=True):
    """The policy: guess, then verify."""

    name: str = "speculative"
    title: str = "guess, then verify (speculative decoding)"
    alone: bool = False
    endless: bool = False
    even: bool = False

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds of the guesses and of their verification behind them."""
        return drafted * times.draft_s + times.verify_s


POLICY = Speculative()
