"""Power of two choices: of two replicas picked at random a request goes to the one with fewer open requests.

Nearly as even as asking all of them (Mitzenmacher, 2001, doi 10.1109/71.963420). The two follow from the request's
number, so that a log of decisions replays.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import ReplicaLoad

#: Multiplier of Knuth's multiplicative hash: 2^32 over the golden ratio.
SPREAD = 2654435769


class PowerOfTwo(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "power-of-two"
    title: str = "to the less loaded of two replicas picked at random"
    looks: bool = True

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the less loaded of two replicas."""
        return min(two_of(request.number, len(loads)), key=lambda one: loads[one].open)


def two_of(number: int, count: int) -> tuple[int, int]:
    """Return two different replicas of `count` for a request, the same one twice where there is one."""
    if count < 2:
        return 0, 0
    mixed = (number + 1) * SPREAD % 2**32
    first = (mixed >> 16) % count
    other = (mixed * SPREAD % 2**32 >> 16) % (count - 1)
    return first, other + (other >= first)


POLICY = PowerOfTwo()
