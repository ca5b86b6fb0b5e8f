"""Pass 3: one layer's operators on their own streams.

The lowest zoom level. A pass over a layer (F, B, W or BW) is a small task graph: kernels on the compute queue,
collectives beside it. It is simulated once per kind of layer with the same engine as the step, and its
duration is reused one level up (``simulate/layer.py``). Here it is written plainly, every kernel and collective after
what it reads; rewrites (``lower/rewrites``) then overlap them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.layers.pieces import Piece
from meshwright.lower.entry import JOINS, LANDS, PRODUCT, WEIGHT, Entry
from meshwright.lower.operators import repeated
from meshwright.lower.rewrites import rewritten
from meshwright.plan import Overlap
from meshwright.work import Gemm, Work

if TYPE_CHECKING:
    from meshwright.work import Collective

#: Every collective of a layer is waited for.
NOTHING = Overlap()
PASSES = ("F", "B", "W", "BW")


class _Program:
    """Collects the entries of a pass; ``last`` are the entries the next one waits for. Nothing waits for what is on
    the queues ``beside``: another microbatch's layers run meanwhile."""

    def __init__(self, beside: tuple[str, ...] = ()) -> None:
        self.entries: list[Entry] = []
        self.beside = beside
        self.last: tuple[int, ...] = ()

    def put(
        self, name: str, queue: str, work: Work, after: tuple[int, ...], again: bool = False, role: str = ""
    ) -> int:
        self.entries.append(Entry(name, queue, work, after, again, role))
        return len(self.entries) - 1

    def chain(self, name: str, queue: str, work: Work, again: bool = False, role: str = "") -> None:
        entry = self.put(name, queue, work, self.last, again, role)
        if queue not in self.beside:
            self.last = (entry,)


def program(pieces: list[Piece], which: str, *, recompute: str = "none", overlap: Overlap = NOTHING) -> list[Entry]:
    """The entries of one pass over `pieces`: ``F``, ``B`` (input gradient), ``W`` (weight gradient) or ``BW``."""
    entries, ends = plain(pieces, which, recompute=recompute, overlap=overlap)
    return rewritten(entries, ends, overlap)


def plain(
    pieces: list[Piece], which: str, *, recompute: str = "none", overlap: Overlap = NOTHING
) -> tuple[list[Entry], tuple[int, ...]]:
    """The entries of a pass before any rewrite, and those that the next layer waits for."""
    p = _Program(("ep",) if overlap.ep else ())
    if which == "F":
        _forward(p, pieces)
    elif which == "W":
        for piece in reversed(pieces):
            _weight(p, piece, start=p.last)
    else:
        if recompute == "full":
            _forward(p, pieces, again=True)
        elif recompute == "operators":
            _forward(p, repeated(pieces), again=True)
        _backward(p, pieces, with_weight=which == "BW", core_again=recompute == "selective")
    return p.entries, p.last


def _role(piece: Piece, way: str) -> str:
    """The part that a piece's work has in rewrites."""
    if piece.joins and piece.queue == "tp":
        return JOINS
    if isinstance(piece.forward, Gemm) and not piece.core:
        return PRODUCT
    return LANDS if piece.lands == way else ""


def _forward(p: _Program, pieces: list[Piece], again: bool = False) -> None:
    for piece in pieces:
        if piece.forward is None:
            continue
        if piece.ring > 1:
            _ring(p, piece, piece.forward, piece.exchange, again)
        else:
            p.chain(piece.name, piece.queue, piece.forward, again, _role(piece, "forward"))


def _backward(p: _Program, pieces: list[Piece], *, with_weight: bool, core_again: bool) -> None:
    core = [piece for piece in pieces if piece.core]
    for piece in reversed(pieces):
        if core_again and core and piece is core[-1]:
            _forward(p, core, again=True)
        start = p.last
        if piece.backward is not None and piece.ring > 1:
            _ring(p, piece, piece.backward, piece.exchange_back, False)
        elif piece.backward is not None:
            p.chain(f"{piece.name} backward", piece.queue, piece.backward, role=_role(piece, "backward"))
        if with_weight:
            # the weight gradient needs nothing but this piece's output gradient, so what follows does not wait for it
            _weight(p, piece, start=start)


def _weight(p: _Program, piece: Piece, start: tuple[int, ...]) -> None:
    if piece.weight is None:
        return
    after = start
    if piece.regather is not None:
        after = (*start, p.put(f"{piece.name} regather", "tp", piece.regather, start, role=WEIGHT))
    p.put(f"{piece.name} weight gradient", piece.queue, piece.weight, after, role=WEIGHT)


def _ring(p: _Program, piece: Piece, block: Work, exchange: Collective, again: bool) -> None:
    """Blocks circulate: while one is worked on, the next arrives (Ring Attention, 2310.01889)."""
    arrived, worked = p.last, p.last
    for step in range(piece.ring):
        worked = (p.put(f"{piece.name} {step + 1}/{piece.ring}", piece.queue, block, arrived, again),)
        if step + 1 < piece.ring:
            arrived = (p.put(f"{piece.name} exchange {step + 1}", "cp", exchange, arrived, again),)
    p.last = worked
