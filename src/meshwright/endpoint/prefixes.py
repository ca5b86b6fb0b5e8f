"""Prefixes: names of the whole units of a prompt, by which caches and routers know prompts that begin alike; and a
request as these deciders are told of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from meshwright.endpoint.seam import Prompted
from meshwright.serving.engine_request import NewRequest


def chain(tokens: Sequence[int], unit: int, root: str = "") -> tuple[int, ...]:
    """Return the names of the whole units of a prompt, each of its tokens and all before them; prompts of another
    `root` (an adapter) have other names."""
    found, last = [], hashlib.blake2b(root.encode(), digest_size=16).digest()
    for at in range(0, len(tokens) - unit + 1, unit):
        text = ",".join(map(str, tokens[at : at + unit])).encode()
        last = hashlib.blake2b(text, digest_size=16, key=last).digest()
        found.append(int.from_bytes(last, "little"))
    return tuple(found)


def decidable(asked: Prompted, adapter: int, hashes: tuple[int, ...], **more: Any) -> NewRequest:
    """Return a request as deciders are told of it: with the number of its adapter (-1: none), the names of its
    prompt's units, and `more` fields where they are not the request's own."""
    said = {
        "limit": asked.limit,
        "tenant": asked.tenant,
        "priority": asked.priority,
        "program": asked.program,
    }
    return NewRequest(asked.number, len(asked.prompt), adapter=adapter, hashes=hashes, **said | more)
