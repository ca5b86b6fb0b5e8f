"""EQSPEC: batched speculation on a cache without pages (Zhang et al. 2025, 2510.22876).

Sequences of a batch accept different numbers of guesses. Where the cache is one tensor, padded on the left, they are
aligned again before the next round, which moves the cache of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.speculative import GuessTimes


class EqSpec(msgspec.Struct, frozen=True):
    """The policy: aligned after every round in which not all accepted as many."""

    name: str = "eqspec"
    title: str = "batched speculation, aligned after every round (EQSPEC)"
    alone: bool = False
    endless: bool = False
    even: bool = True

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds of guesses, verification and alignment."""
        ragged = len(set(accepted)) > 1
        return drafted * times.draft_s + times.verify_s + ragged * times.realign_s


POLICY = EqSpec()
