"""EXSPEC: batched speculation that groups sequences of one length (Zhang et al. 2025, 2510.22876).

As EQSPEC, over a pool larger than a batch: sequences that are equally long make the next batch and need no alignment;
only those without a partner are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from meshwright.serving.speculative import GuessTimes


class ExSpec(msgspec.Struct, frozen=True):
    """The policy: the sequences that accepted as many as another need no alignment."""

    name: str = "exspec"
    title: str = "batched speculation in groups of one length (EXSPEC)"
    alone: bool = False
    endless: bool = False
    even: bool = True

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds of guesses and verification, and of moving those without a partner."""
        lone = sum(count for count in Counter(accepted).values() if count == 1)
        moved = lone / len(accepted) if len(accepted) > 1 else 0.0
        return drafted * times.draft_s + times.verify_s + moved * times.realign_s


POLICY = ExSpec()
