"""Distributed speculative inference: guessing never waits for the verdict (Timor et al., ICLR 2025, 2405.14105).

While the draft model goes on, copies of the model verify what it has guessed so far, at the same time; the first guess
that is wrong cancels everything behind it. Guesses go to a copy in blocks as long as needed for one of the ``targets``
copies to be free (its equation 1). A round here is what lies between two wrong guesses: up to the block with the wrong
one the draft model's time passes alone, then one verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from meshwright.serving.speculative import GuessTimes


class Dsi(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "dsi"
    title: str = "guessing beside verification by several copies (DSI)"
    alone: bool = True
    endless: bool = True
    even: bool = False

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds until the first wrong guess is known; where all are right those of the guesses alone, one
        of them more."""
        right = max(accepted, default=0)
        if right >= drafted:
            return (drafted + 1) * times.draft_s
        block = lookahead(times)
        return right // block * block * times.draft_s + times.verify_s


def lookahead(times: GuessTimes) -> int:
    """Return the fewest guesses of a block for which a copy of the model is always free."""
    if times.draft_s <= 0:
        return 1
    block = 1
    while ceil(times.verify_s / (block * times.draft_s)) > times.targets:
        block += 1
    return block


POLICY = Dsi()
