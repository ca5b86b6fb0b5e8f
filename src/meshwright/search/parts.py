"""Inner parts: all combinations of the words that one rank's layers depend on, under one core, as a sequence.

There are many, and they are a few orders of the mesh's axes times a few combinations of all other words (``rests``). A
cost that depends on one of the two alone is computed once for each of its values, and numpy spreads it to all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from meshwright.search.space import Inner


class Inners(Sequence):
    """A sequence of A inner parts, part i being ``rests[rest[i]]`` with the axes in the order ``orders[order[i]]``.

    The order of every member of ``rests`` is empty. ``layers``, ``shares`` and ``overlaps`` are the sets of all values
    of ``recompute_layers``, ``shares`` and ``overlap`` in ``rests``."""

    def __init__(self, parts: Iterable[Inner]):
        self._parts = tuple(parts)
        orders: dict[tuple[str, ...], int] = {}
        rests: dict[Inner, int] = {}
        places = [
            (orders.setdefault(i.order, len(orders)), rests.setdefault(i._replace(order=()), len(rests)))
            for i in self._parts
        ]
        self.orders, self.rests = tuple(orders), tuple(rests)
        self.order, self.rest = np.array(places, np.int64).reshape(-1, 2).T
        self._values()

    @classmethod
    def crossed(cls, groups: Sequence[Sequence[Inner]], orders: tuple[tuple[str, ...], ...]) -> Inners:
        """Groups of different inner parts without their order, group by group under each of the `orders`."""
        out = object.__new__(cls)
        out.orders, out.rests = orders, tuple(rest for group in groups for rest in group)
        at = out.rests[0]._fields.index("order") if out.rests else 0
        make = [(rest._make, rest[:at], rest[at + 1 :]) for rest in out.rests]
        sizes, first, order, rest = len(orders), 0, [], []
        for group in groups:
            order.append(np.repeat(np.arange(sizes), len(group)))
            rest.append(np.tile(np.arange(first, first + len(group)), sizes))
            first += len(group)
        out.order, out.rest = (np.concatenate([np.zeros(0, np.int64), *each]) for each in (order, rest))
        parts = zip(out.order.tolist(), out.rest.tolist())
        out._parts = tuple(make[r][0]((*make[r][1], orders[o], *make[r][2])) for o, r in parts)
        out._values()
        return out

    def _values(self) -> None:
        """Note all values of the fields that decide which parts go together."""
        self.layers = frozenset(rest.recompute_layers for rest in self.rests)
        self.shares = frozenset(rest.shares for rest in self.rests)
        self.overlaps = frozenset(rest.overlap for rest in self.rests)

    def grouped(self, *fields: str) -> list[np.ndarray]:
        """The places of the parts that agree on these fields, which the order is not among."""
        known: dict[tuple, int] = {}
        code = [known.setdefault(tuple(getattr(rest, f) for f in fields), len(known)) for rest in self.rests]
        if len(known) == 1:
            return [np.arange(len(self))]
        group = np.array(code, np.int64)[self.rest]
        return [np.flatnonzero(group == number) for number in np.flatnonzero(np.bincount(group))]

    def take(self, chosen: np.ndarray, overlaps: frozenset | None = None) -> Inners:
        """The chosen ones: places, or which of them as a mask. Orders and rests keep their numbers.
        `overlaps` are all values of ``overlap`` among them, where that is fewer."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        out = object.__new__(Inners)
        out._parts = tuple(self._parts[i] for i in places.tolist())
        out.orders, out.rests, out.layers, out.shares = self.orders, self.rests, self.layers, self.shares
        out.overlaps = self.overlaps if overlaps is None else overlaps
        out.order, out.rest = self.order[places], self.rest[places]
        return out

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index):
        return self._parts[index]

    def __iter__(self) -> Iterator[Inner]:
        return iter(self._parts)
