"""KV budgets: how much of a context's keys and values an engine keeps on the device, and reads for the next token.

A budget that reads less than all of a context is approximate: answers differ from those of the whole cache, and what
they lose is in its paper. The shares are of a token's bytes of keys and values, over all layers. A number above 1
stands for so many tokens, however long the context.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

import msgspec


class KvShares(msgspec.Struct, frozen=True):
    """Shares of the keys and values of a context: ``device`` is kept on the device, ``read`` by each next token's
    attention, ``fetched`` from the host's memory, or its drives (``on_drives``), for each next token. Where they lie in
    drives that compute attention themselves (``in_drive``) a next token takes none of the device's time for it. What is
    fetched may be ``chosen`` by the queries of the layer that reads it: it is neither asked for before they are there,
    nor is anything read meanwhile."""

    device: float = 1.0
    read: float = 1.0
    fetched: float = 0.0
    in_drive: bool = False
    on_drives: bool = False
    chosen: bool = False

    @property
    def exact(self) -> bool:
        """Whether attention reads all of a context."""
        return self.read == 1.0


def tokens_kept(tokens: int, share: float) -> int:
    """Return how many of so many tokens a budget keeps that leaves a share of a context on the device, or so many."""
    return min(tokens, int(share)) if share > 1.0 else ceil(tokens * share)


def number_of(text: str) -> float:
    """Read the number of a budget, a share (``0.2``) or tokens (``819t``)."""
    return float(text.removesuffix("t"))


class KvBudget(Protocol):
    """A budget: :meth:`shares` of a model whose keys of one token in one layer are `width` numbers, as are its values.
    ``usual`` is its number where nobody says one, and ``wanted`` what that number is. ``counts``: it may be one of
    tokens, which stays as it is while a context grows."""

    name: str
    title: str
    usual: float
    wanted: str
    counts: bool

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares."""
