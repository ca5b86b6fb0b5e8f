"""Pass 3: one layer's operators on their own streams.

The lowest zoom level. A pass over a layer (F, B, W or BW) is a small task graph: kernels on the compute queue,
collectives beside it. It is simulated once per kind of layer with the same engine as the step, and its
duration is reused one level up (``simulate/layer.py``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.graph import GraphBuilder, TaskGraph
from meshwright.layers.pieces import Piece
from meshwright.lower.operators import repeated
from meshwright.plan import Overlap
from meshwright.work import Collective, Gemm, Work

#: Every collective of a layer is waited for.
NOTHING = Overlap()
PASSES = ("F", "B", "W", "BW")


class Entry(NamedTuple):
    """One task of a pass: its queue, what it does, the entries it waits for."""

    name: str
    queue: str
    work: Work
    after: tuple[int, ...]
    again: bool = False


class _Program:
    """Collects the entries of a pass; ``last`` are the entries the next one waits for. Nothing waits for what is on
    the queues ``beside``: another microbatch's layers run meanwhile."""

    def __init__(self, beside: tuple[str, ...] = ()) -> None:
        self.entries: list[Entry] = []
        self.beside = beside
        self.last: tuple[int, ...] = ()

    def put(self, name: str, queue: str, work: Work, after: tuple[int, ...], again: bool = False) -> int:
        self.entries.append(Entry(name, queue, work, after, again))
        return len(self.entries) - 1

    def chain(self, name: str, queue: str, work: Work, again: bool = False) -> None:
        entry = self.put(name, queue, work, self.last, again)
        if queue not in self.beside:
            self.last = (entry,)


def program(pieces: list[Piece], which: str, *, recompute: str = "none", overlap: Overlap = NOTHING) -> list[Entry]:
    """The entries of one pass over `pieces`: ``F``, ``B`` (input gradient), ``W`` (weight gradient) or ``BW``."""
    p, overlap_tp = _Program(("ep",) if overlap.ep else ()), overlap.tp
    if which == "F":
        _forward(p, pieces, overlap_tp)
    elif which == "W":
        for piece in reversed(pieces):
            _weight(p, piece, start=p.last)
    else:
        if recompute == "full":
            _forward(p, pieces, overlap_tp, again=True)
        elif recompute == "operators":
            _forward(p, repeated(pieces), False, again=True)
        _backward(p, pieces, with_weight=which == "BW", core_again=recompute == "selective", overlap_tp=overlap_tp)
    return p.entries


def _forward(p: _Program, pieces: list[Piece], overlap_tp: bool, again: bool = False) -> None:
    skip = False
    for i, piece in enumerate(pieces):
        if skip or piece.forward is None:
            skip = False
            continue
        partner = _partner(pieces, i, step=1) if overlap_tp else None
        if piece.ring > 1:
            _ring(p, piece, piece.forward, piece.exchange, again)
        elif partner is not None and partner.forward is not None:
            _sliced(p, piece, partner, "forward", again)
            skip = True
        else:
            p.chain(piece.name, piece.queue, piece.forward, again)


def _backward(p: _Program, pieces: list[Piece], *, with_weight: bool, core_again: bool, overlap_tp: bool) -> None:
    core = [piece for piece in pieces if piece.core]
    backwards = pieces[::-1]
    skip = False
    for i, piece in enumerate(backwards):
        if skip:
            skip = False
            continue
        if core_again and core and piece is core[-1]:
            _forward(p, core, False, again=True)
        partner = _partner(backwards, i, step=1) if overlap_tp else None
        start = p.last
        if piece.backward is None:
            pass
        elif piece.ring > 1:
            _ring(p, piece, piece.backward, piece.exchange_back, False)
        elif partner is not None and partner.backward is not None:
            _sliced(p, piece, partner, "backward", False)
            skip = True
        else:
            p.chain(f"{piece.name} backward", piece.queue, piece.backward)
        if with_weight:
            # the weight gradient needs nothing but this piece's output gradient, so what follows does not wait for it
            for one in (piece, partner) if skip else (piece,):
                _weight(p, one, start=start)


def _weight(p: _Program, piece: Piece, start: tuple[int, ...]) -> None:
    if piece.weight is None:
        return
    after = start
    if piece.regather is not None:
        after = (*start, p.put(f"{piece.name} regather", "tp", piece.regather, start))
    p.put(f"{piece.name} weight gradient", piece.queue, piece.weight, after)


def _partner(pieces: list[Piece], i: int, step: int) -> Piece | None:
    """The neighbour a collective and a GEMM are sliced with, if piece i and the next one are such a pair."""
    if i + step >= len(pieces):
        return None
    a, b = pieces[i], pieces[i + step]
    for comm, product in ((a, b), (b, a)):
        if comm.queue == "tp" and comm.joins and isinstance(product.forward, Gemm) and not product.core:
            return b
    return None


def _sliced(p: _Program, a: Piece, b: Piece, way: str, again: bool) -> None:
    """Slice a collective and its GEMM so that each part of one is overlapped with the next of the other (Wang et al.,
    ASPLOS 2023, decompose a collective and the product that depends on it). A rank's own part does not travel: of a
    gather it is the first multiplied, of a scatter the last."""
    first, second = getattr(a, way), getattr(b, way)
    gathers = isinstance(first, Collective)
    count = (first if gathers else second).group.size
    start, done = p.last, ()
    suffix = "" if way == "forward" else " backward"
    for part in range(count):
        label = f"{suffix} {part + 1}/{count}"
        before = start
        if not (gathers and part == 0):
            before = (p.put(f"{a.name}{label}", a.queue, _part(first, count), start, again),)
        done = before
        if gathers or part + 1 < count:
            done = (p.put(f"{b.name}{label}", b.queue, _part(second, count), before, again),)
    p.last = done


def _part(work: Work, count: int) -> Work:
    if isinstance(work, Collective):
        # decomposed, the collective is a ring of sends: one part travels to the neighbour while one is multiplied
        return msgspec.structs.replace(work, op="send", num_bytes=work.num_bytes / count)
    return msgspec.structs.replace(work, m=-(-work.m // count), slices=count)


def _ring(p: _Program, piece: Piece, block: Work, exchange: Collective, again: bool) -> None:
    """Blocks circulate: while one is worked on, the next arrives (Ring Attention, 2310.01889)."""
    arrived, worked = p.last, p.last
    for step in range(piece.ring):
        worked = (p.put(f"{piece.name} {step + 1}/{piece.ring}", piece.queue, block, arrived, again),)
        if step + 1 < piece.ring:
            arrived = (p.put(f"{piece.name} exchange {step + 1}", "cp", exchange, arrived, again),)
    p.last = worked


#: Queue and entries waited for, of each entry.
Structure = tuple[tuple[str, tuple[int, ...]], ...]


def structure_of(entries: list[Entry]) -> Structure:
    """The structure of a pass, which decides its graph: the queue of each entry and the entries it waits for."""
    return tuple([(e.queue, e.after) for e in entries])


@lru_cache(maxsize=512)
def graph_of(structure: Structure) -> TaskGraph:
    """The graph of a pass, one cost key per task; durations live beside it, so equal structures share it."""
    builder = GraphBuilder(("layer",))
    for i, (queue, after) in enumerate(structure):
        builder.add("op", str(i), builder.stream(0, queue), after, layer=i)
    return builder.build()
