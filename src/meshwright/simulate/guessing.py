"""The guesses of next tokens in the simulator: which come true, and what a round of them takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.serving.batching import Share
from meshwright.serving.speculative import GuessTimes, SpeculationPolicy
from meshwright.simulate.iterations import IterationCosts

#: Multipliers of the hash that says whether a guess comes true (Knuth's, and one of SplitMix64).
SPREAD, MIX = 2654435769, 0xBF58476D1CE4E5B9


class Guesses(msgspec.Struct, frozen=True, kw_only=True):
    """The guesses of an engine: each comes true with the chance ``accept``, whatever the others do.

    ``draft`` are the costs of the draft model's iterations; None where guesses cost nothing. ``realign_s`` is what it
    takes to move the cache of one token; a draft model that ``forgets`` reads all of its sequences in each round."""

    policy: SpeculationPolicy
    accept: float
    draft: IterationCosts | None = None
    targets: int = 1
    realign_s: float = 0.0
    forgets: bool = False

    def come_true(self, number: int, generated: int, drafted: int) -> int:
        """Return how many of the guesses behind the `generated` tokens of a request come true, the first ones."""
        for i in range(drafted):
            if chance(number, generated + i) >= self.accept:
                return i
        return drafted

    def right(self, output: np.ndarray) -> np.ndarray:
        """Return how many guesses come true behind every token of answers of so many tokens [n], up to 255, answer by
        answer."""
        number = np.repeat(np.arange(len(output)), output)
        position = np.arange(len(number)) - np.repeat(np.cumsum(output) - output, output)
        wrong = np.flatnonzero(chances(number, position) >= self.accept)
        after = np.append(wrong, len(number))[np.searchsorted(wrong, np.arange(len(number)))]
        return np.minimum(after - np.arange(len(number)), 255).astype(np.uint8)

    def round_s(self, shares: Sequence[Share], accepted: Sequence[int], verify_s: float) -> float:
        """Return the seconds of an iteration with guesses, of which the model's own take `verify_s`."""
        guessed = [share for share in shares if share.drafted]
        contexts = [share.past + 1 for share in guessed]
        step_s = self._step_s(contexts)
        times = GuessTimes(step_s, verify_s, realign_s=self.realign_s * sum(contexts), targets=self.targets)
        again = 0.0
        if self.forgets and self.draft is not None:  # the first guess is what reading ends with
            n = len(contexts)
            again = self._read_s(n, sum(contexts), 0.0) + float(self.draft.sampled_s[n]) - step_s
        return again + self.policy.round_s(max(share.drafted for share in guessed), accepted, times)

    def prompt_s(self, shares: Sequence[Share]) -> float:
        """Return the seconds in which the draft model reads prompts."""
        prompts = [share for share in shares if not share.drafted and share.new > 1]
        if not prompts or self.forgets:
            return 0.0
        past = sum(share.past for share in prompts) / len(prompts)
        return self._read_s(len(prompts), sum(share.new for share in prompts), past)

    def _read_s(self, count: int, tokens: int, past: float) -> float:
        """Seconds in which the draft model reads the `tokens` of so many sequences behind `past` ones of each."""
        if self.draft is None:
            return 0.0
        most = min(tokens, self.draft.most_tokens)
        own = float(self.draft.linear_s[most]) * tokens / most
        return own + self.draft.prefilling(count, tokens / count, past)

    def _step_s(self, contexts: Sequence[int]) -> float:
        """Seconds of one step of the draft model."""
        if self.draft is None:
            return 0.0
        n = len(contexts)
        own = float(self.draft.linear_s[n] + self.draft.sampled_s[n])
        return own + self.draft.decoding(n, sum(contexts) / n)


def chances(number: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return :func:`chance` of many tokens."""
    mixed = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(SPREAD)
    mixed += (position.astype(np.uint64) + np.uint64(1)) * np.uint64(MIX)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(MIX)
    return ((mixed ^ mixed >> np.uint64(27)) * np.uint64(SPREAD) >> np.uint64(11)).astype(np.float64) / 2**53


def chance(number: int, position: int) -> float:
    """Return a number from 0 to 1 that looks random and is always the same for a token of a request."""
    mixed = ((number + 1) * SPREAD + (position + 1) * MIX) % 2**64
    mixed = (mixed ^ mixed >> 30) * MIX % 2**64
    return ((mixed ^ mixed >> 27) * SPREAD % 2**64 >> 11) / 2**53
