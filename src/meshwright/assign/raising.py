"""Raising items one after the other for as long as all is within bounds: the least that has to stay low.

Items come in the order of what is gained by raising them. The usual greedy asks of each whether it fits beside those
that were raised before. Where a set that fits does so without some of its items too, whole runs of items are asked for
at once, and halves of what does not fit: the same items are raised, after a question for each one that is not and
its neighbours in place of one for every item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def raised(items: Sequence[T], fits: Callable[[frozenset[T]], bool]) -> frozenset[T]:
    """The items that can be raised together, each beside those before it in the given order."""
    taken: frozenset[T] = frozenset()
    waiting = [tuple(items)]
    while waiting:
        some = waiting.pop()
        if not some:
            continue
        if fits(more := taken | frozenset(some)):
            taken = more
        elif len(some) > 1:
            half = len(some) // 2
            waiting += [some[half:], some[:half]]
    return taken
