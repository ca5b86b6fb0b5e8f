"""Reference points: when the point moves at which replicas know the gradient of all.

A reference moves by chance, once in so many steps in the mean, so that no step is special (loopless variance reduction,
Kovalev et al. 1901.08689). All ranks draw the same.
"""

from __future__ import annotations

from hashlib import blake2b


def moves(step: int, every: int, seed: int) -> bool:
    """Return whether the reference moves at the beginning of a step, counted from 0: always in the first."""
    mixed = blake2b(repr((seed, step, "reference")).encode(), digest_size=8).digest()
    return step == 0 or int.from_bytes(mixed, "little") * every < 1 << 64
