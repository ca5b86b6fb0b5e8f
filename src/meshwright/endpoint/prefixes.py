"""Prefixes: names of the whole units of a prompt, by which caches and routers know prompts that begin alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def chain(tokens: Sequence[int], unit: int, root: str = "") -> tuple[int, ...]:
    """Return the names of the whole units of a prompt, each of its tokens and all before them; prompts of another
    `root` (an adapter) have other names."""
    found, last = [], hashlib.blake2b(root.encode(), digest_size=16).digest()
    for at in range(0, len(tokens) - unit + 1, unit):
        text = ",".join(map(str, tokens[at : at + unit])).encode()
        last = hashlib.blake2b(text, digest_size=16, key=last).digest()
        found.append(int.from_bytes(last, "little"))
    return tuple(found)
