"""Entries: the tasks of a pass over one layer, each with its queue, its work and what it waits for."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.graph import GraphBuilder, TaskGraph
from meshwright.work import Work

#: Roles of entries that rewrites look for: a collective that may be cut with the product next to it, such a product, a
#: weight gradient with the gather of its input, and the first kernel behind a collective, which adds or reads its sum.
JOINS, PRODUCT, WEIGHT, LANDS = "joins", "product", "weight", "lands"
#: The role of an entry that is none of a plain pass: it moves what others compute to where it is read.
MOVES = "moves"
#: Layers in a row that are simulated where one waits for parts of the one before: the last of them is the steady state.
ROW = 3


class Origin(NamedTuple):
    """The work of a plain pass that an entry does: of its entry number ``entry`` the part that every one of ``cuts``
    (dimension, part, parts) leaves, in the layer that is ``behind`` layers before this one."""

    entry: int
    cuts: tuple[tuple[str, int, int], ...] = ()
    behind: int = 0


class Entry(NamedTuple):
    """One task of a pass: its queue, what it does, the entries it waits for (``after``), and those of the layer before
    (``late``). ``again``: it repeats forward work. ``origins`` are given where a rewrite made it."""

    name: str
    queue: str
    work: Work
    after: tuple[int, ...]
    again: bool = False
    role: str = ""
    late: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()


#: Queue, entries waited for, and those of the layer before, of each entry.
Structure = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def structure_of(entries: list[Entry] | tuple[Entry, ...]) -> Structure:
    """The structure of a pass, which decides its graph: the queue of each entry and the entries it waits for."""
    return tuple([(e.queue, e.after, e.late) for e in entries])


def in_a_row(structure: Structure) -> int:
    """Return the number of layers that are simulated one after the other: several where one waits for parts of the
    one before, else one."""
    return ROW if any(late for _, _, late in structure) else 1


@lru_cache(maxsize=512)
def graph_of(structure: Structure) -> TaskGraph:
    """The graph of a pass, one cost key per entry; durations live beside it, so equal structures share it. Where a
    layer waits for parts of the one before it is that of several in a row, numbered as steps."""
    builder = GraphBuilder(("layer",))
    size = len(structure)
    for step in range(in_a_row(structure)):
        for i, (queue, after, late) in enumerate(structure):
            waits = [step * size + a for a in after]
            waits += [(step - 1) * size + a for a in late] if step else []
            builder.add("op", str(i), builder.stream(0, queue), waits, layer=i, step=step)
    return builder.build()
