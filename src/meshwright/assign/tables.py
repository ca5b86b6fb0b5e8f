"""Embedding tables onto ranks: whole, by rows, by columns or replicated, so that the busiest rank has least to do.

The four ways of 4D parallelism (Mudigere et al., 2022, arXiv 2104.05158, section 4.2). A table that is cut by rows has
an equal share of them on every rank, one that is cut by columns some slices that are placed like tables, one that is
replicated is on every rank. Whole tables and slices are items whose cost is what they take of a step and whose size is
their memory, assigned by a method of :mod:`meshwright.assign`. With towers (DMT, Luo et al., 2024, arXiv 2403.00877)
tables are assigned to nodes first, and to the ranks of their node then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Assigned, Problem, least_load, solve

#: The ways of one table.
WHOLE, ROWS, COLUMNS, REPLICATED = "table", "row", "column", "data"


class TableItem(msgspec.Struct, frozen=True):
    """One way of a table: ``way``, its slices by columns (``parts``, 1 where it is not cut so), the bytes of
    the whole table with its optimizer state, and the ``cost`` of all its lookups in a step, in any unit."""

    way: str
    parts: int
    num_bytes: float
    cost: float


class TablePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """``rank_of[t]`` are the ranks of a table's slices, one for a whole table, () for one that is on every rank of its
    tower (all ranks without towers) by rows, or replicated. ``tower_of[t]`` is the tower, 0 without towers, -1 for a
    replicated table. ``busiest`` is the cost of the busiest rank, of which no placement of the same ways gets below
    ``bound``. ``crowded``: no placement that the method found has room on every rank."""

    items: tuple[TableItem, ...]
    rank_of: tuple[tuple[int, ...], ...]
    tower_of: tuple[int, ...]
    num_ranks: int
    tower: int
    busiest: float
    bound: float
    crowded: bool

    @property
    def gap(self) -> float:
        """How far the busiest rank is above the bound, relative: 0.02 is 2%."""
        return self.busiest / self.bound - 1.0 if self.bound else 0.0

    def ranks(self, table: int) -> tuple[int, ...]:
        """Return the ranks that hold a part of a table, one for every slice."""
        if self.rank_of[table]:
            return self.rank_of[table]
        if self.tower_of[table] < 0:
            return tuple(range(self.num_ranks))
        first = self.tower_of[table] * self.tower
        return tuple(range(first, first + self.tower))


def place_tables(
    items: Sequence[TableItem], *, ranks: int, tower: int, capacity: float, method: str = "heaviest-first"
) -> TablePlacement:
    """Place tables on so many `ranks`, of which `tower` make a tower (all of them: there are none), each with room for
    so many bytes.

    Raises:
        MeshwrightError: R004 for a method that is none, L003 for one whose solver is not installed.
        ValueError: ranks that towers do not divide.
    """
    if ranks % tower:
        raise ValueError(f"{ranks} ranks are not towers of {tower}")
    towers, everywhere = ranks // tower, sum(item.num_bytes for item in items if item.way == REPLICATED)
    room, crowded = capacity - everywhere, False
    tower_of = [-1 if item.way == REPLICATED else 0 for item in items]
    if towers > 1:
        some = [t for t, item in enumerate(items) if item.way != REPLICATED]
        size, cost = [items[t].num_bytes for t in some], [items[t].cost for t in some]
        found, full = _solved(method, size, cost, towers, room * tower)
        crowded |= full
        for t, one in zip(some, found.bin_of.tolist()):
            tower_of[t] = one
    rank_of: list[tuple[int, ...]] = [() for _ in items]
    load = np.zeros(ranks)
    for one in range(towers):
        mine = [t for t, of in enumerate(tower_of) if of == one]
        by_rows = [items[t] for t in mine if items[t].way == ROWS]
        held = sum(item.num_bytes for item in by_rows) / tower
        slices = [t for t in mine if items[t].way in (WHOLE, COLUMNS) for _ in range(items[t].parts)]
        size, cost = ([getattr(items[t], what) / items[t].parts for t in slices] for what in ("num_bytes", "cost"))
        found, full = _solved(method, size, cost, tower, room - held)
        crowded |= full
        at = slice(one * tower, (one + 1) * tower)
        load[at] = sum(item.cost for item in by_rows) / tower
        for t, where, spent in zip(slices, found.bin_of.tolist(), cost):
            rank_of[t] = (*rank_of[t], one * tower + where)
            load[one * tower + where] += spent
    return TablePlacement(
        items=tuple(items),
        rank_of=tuple(rank_of),
        tower_of=tuple(tower_of),
        num_ranks=ranks,
        tower=tower,
        busiest=float(load.max()),
        bound=_bound(items, ranks),
        crowded=crowded or room < 0,
    )


def _solved(method: str, sizes: list[float], costs: list[float], bins: int, room: float) -> tuple[Assigned, bool]:
    """An assignment within the room, or, where the method finds none, one without regard to it."""
    size, cost = np.ceil(np.array(sizes)).astype(np.int64), np.array(costs, np.float64)
    size = np.maximum(size, 1)
    if len(size) and size.max() <= room:
        found = solve(method, Problem(sizes=size, capacity=int(room), costs=cost, num_bins=bins))
        if (found.bin_of >= 0).all():
            return found, False
    everything = max(1, int(size.sum()))
    found = solve(method, Problem(sizes=size, capacity=everything, costs=cost, num_bins=bins))
    return found, bool(len(size))


def _bound(items: Sequence[TableItem], ranks: int) -> float:
    """The cost that the busiest rank of no placement of these ways is below: what all take over all ranks, and the
    costliest slices."""
    costs: NDArray[np.float64] = np.array(
        [i.cost / i.parts for i in items if i.way in (WHOLE, COLUMNS) for _ in range(i.parts)], np.float64
    )
    by_rows = sum(item.cost for item in items if item.way == ROWS) / ranks
    if not len(costs):
        return by_rows
    sizes = np.ones(len(costs), np.int64)
    # rows may lie in one tower alone, so that only their sum over all ranks is sure
    alone = least_load(Problem(sizes=sizes, capacity=len(costs), costs=costs, num_bins=ranks))
    return max(alone, float(costs.sum()) / ranks + by_rows)
