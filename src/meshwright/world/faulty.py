"""Faulty workers: replicas that bring something else than their gradient to every exchange.

``--world faulty=2`` has the last two replicas send noise, ``faulty=2:reversed:10`` their gradients turned round and ten
times as long, ``faulty=1:nothing`` zeros. It is what Byzantine-robust ways to combine gradients are for (Blanchard et
al., 2017, arXiv 1703.02757, whose two attacks the first and second are).
"""

from __future__ import annotations

import re

import msgspec

#: What a faulty worker sends in place of its gradient.
NOISE, REVERSED, NOTHING = "noise", "reversed", "nothing"
WAYS = (NOISE, REVERSED, NOTHING)
#: Most faulty workers, and how many times as long as its gradient what one sends may be.
MOST, LONGEST = 10**6, 1e6
WANTED = "a number of replicas, such as 2, 2:reversed or 2:noise:10"
_WORDS = re.compile(rf"(\d{{1,7}})(?::({'|'.join(WAYS)})(?::(\d+(?:\.\d+)?))?)?", re.IGNORECASE)


class FaultyWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The last ``count`` replicas of a job, which send ``noise`` (normal numbers), ``reversed`` gradients or
    ``nothing`` (zeros), ``times`` as long as their own gradients. ``seed``: of the noise."""

    count: int
    sends: str = NOISE
    times: float = 10.0
    seed: int = 0


def faulty(text: str) -> dict[str, object] | None:
    """The fields that a text says, None where it says none."""
    found = _WORDS.fullmatch(text.strip())
    if found is None or not 1 <= int(found[1]) <= MOST or not 0 < float(found[3] or 1) <= LONGEST:
        return None
    said: dict[str, object] = {"count": int(found[1])}
    said |= {"sends": found[2].lower()} if found[2] else {}
    return said | ({"times": float(found[3])} if found[3] else {})
