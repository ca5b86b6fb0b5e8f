"""Pass 3: one layer's operators on their own streams.

The lowest zoom level. A pass over a layer (F, B, W or BW) is a small task graph: kernels on the compute queue,
collectives beside it. It is simulated once per kind of layer with the same engine as the step, and its
duration is reused one level up (``simulate/layer.py``). Here it is written plainly, every kernel and collective after
what it reads; rewrites (``lower/rewrites``) then overlap them.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.pieces import Piece, RingMoves
from meshwright.lower.entry import JOINS, LANDS, PRODUCT, WEIGHT, Entry
from meshwright.lower.operators import repeated
from meshwright.lower.rewrites import rewritten
from meshwright.plan import Overlap
from meshwright.work import Collective, Gemm, GroupedGemm, Work

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
        self.opened: dict[str, int] = {}

    def open(self, name: str, entry: int) -> None:
        """Let what follows run beside an entry, until it is closed."""
        self.opened[name] = entry

    def close(self, name: str) -> None:
        """Have what follows wait for what was opened, unless nothing of this pass waits for its queue."""
        entry = self.opened.pop(name, None)
        if entry is not None and self.entries[entry].queue not in self.beside:
            self.last = (*self.last, entry)

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


def portioned(portions: list[list[Piece]], which: str, first: list[Piece]) -> list[Entry]:
    """The entries of a backward of a layer in portions of the sequence, from the last to the first, each run forward
    again behind what is run `first` for the whole sequence."""
    p = _Program()
    _forward(p, first, again=True)
    for pieces in reversed(portions):
        _forward(p, pieces, again=True)
        _backward(p, pieces, with_weight=which == "BW", core_again=False)
    return p.entries


def losing(portions: list[list[Piece]], which: str) -> list[Entry]:
    """The entries of a backward of head and loss in portions, each of which is run forward here alone; or of a forward
    that no backward follows."""
    p = _Program()
    for pieces in portions:
        _forward(p, pieces)
        if which != "F":
            _backward(p, pieces, with_weight=which == "BW", core_again=False)
    return p.entries


def _role(piece: Piece, way: str) -> str:
    """The part that a piece's work has in rewrites."""
    if piece.joins and piece.queue == "tp":
        return JOINS
    if isinstance(piece.forward, Gemm) and not piece.core:
        return PRODUCT
    return LANDS if piece.lands == way else ""


def _forward(p: _Program, pieces: list[Piece], again: bool = False) -> None:
    early = {
        id(one): p.put(one.name, one.queue, one.forward, p.last, again)
        for one in pieces
        if one.early and not (again and one.brought)
    }
    for i, piece in enumerate(pieces):
        if piece.closes:
            p.close(piece.closes)
        if piece.forward is None or (again and piece.brought):
            continue
        if piece.early:
            p.last = (*p.last, early[id(piece)])
        elif piece.opens:
            p.open(piece.opens, p.put(piece.name, piece.queue, piece.forward, p.last, again))
        elif piece.portions > 1:
            if i == 0 or pieces[i - 1].portions == 1:
                _portioned(p, _run(pieces, i), "forward", again=again)
        elif piece.ring > 1:
            _ring(p, piece, piece.forward, piece.exchange, piece.merge, again)
        else:
            p.chain(piece.name, piece.queue, piece.forward, again, _role(piece, "forward"))


def _backward(p: _Program, pieces: list[Piece], *, with_weight: bool, core_again: bool) -> None:
    core = [piece for piece in pieces if piece.core]
    backwards = pieces[::-1]
    for i, piece in enumerate(backwards):
        if core_again and core and piece is core[-1]:
            _forward(p, core, again=True)
        if piece.closes:
            opener = next(one for one in backwards if one.opens == piece.closes)
            back = p.put(f"{opener.name} backward", opener.queue, opener.backward, p.last)
            p.open(piece.closes, back)
        if piece.opens:
            p.close(piece.opens)
            continue
        if piece.early:
            p.put(f"{piece.name} backward", piece.queue, piece.backward, p.last)
            continue
        if piece.portions > 1:
            if i == 0 or backwards[i - 1].portions == 1:
                _portioned(p, _run(backwards, i), "backward", with_weight=with_weight)
            continue
        start = p.last
        if piece.backward is not None and piece.ring > 1:
            _ring(p, piece, piece.backward, piece.exchange_back, piece.merge_back, False)
        elif piece.backward is not None:
            p.chain(f"{piece.name} backward", piece.queue, piece.backward, role=_role(piece, "backward"))
        if with_weight:
            # the weight gradient needs nothing but this piece's output gradient, so what follows does not wait for it
            _weight(p, piece, start=start)


def _run(pieces: list[Piece], start: int) -> list[Piece]:
    """The pieces from `start` on that take their tokens portion by portion."""
    end = start
    while end < len(pieces) and pieces[end].portions > 1:
        end += 1
    return pieces[start:end]


def _portioned(p: _Program, pieces: list[Piece], way: str, *, again: bool = False, with_weight: bool = False) -> None:
    """Take the tokens of some pieces portion by portion: all exchanges in front of the first product are issued at
    once, then each portion's products and what is behind them, so that one portion travels while another is multiplied
    (Tutel, 2206.03382; Lina, 2210.17223)."""
    count, start = pieces[0].portions, p.last
    first = next((i for i, one in enumerate(pieces) if one.queue == "compute"), len(pieces))
    ended: list[tuple[int, ...]] = [start] * count

    def put(piece: Piece, portion: int) -> None:
        before, work = ended[portion], getattr(piece, way)
        suffix = "" if way == "forward" else " backward"
        if work is not None:
            name = f"{piece.name}{suffix} {portion + 1}/{count}"
            ended[portion] = (p.put(name, piece.queue, _portion(work, count), before, again),)
        if with_weight and piece.weight is not None:
            p.put(
                f"{piece.name} weight gradient {portion + 1}/{count}",
                piece.queue,
                _portion(piece.weight, count),
                before,
                role=WEIGHT,
            )

    if again:
        pieces, first = [one for one in pieces if not one.brought], first - sum(bool(o.brought) for o in pieces[:first])
    for portion in range(count):
        for piece in pieces[:first]:
            put(piece, portion)
    for portion in range(count):
        for piece in pieces[first:]:
            put(piece, portion)
    p.last = tuple(dict.fromkeys(entry for some in ended for entry in some))


def _portion(work: Work, count: int) -> Work:
    """One of so many equal portions of a work item's tokens."""
    if isinstance(work, Collective):
        routed = work.routed
        if routed is not None:
            routed = msgspec.structs.replace(routed, tokens=-(-routed.tokens // count))
        return msgspec.structs.replace(work, num_bytes=work.num_bytes / count, routed=routed)
    if isinstance(work, GroupedGemm):
        return msgspec.structs.replace(work, rows=-(-work.rows // count))
    return msgspec.structs.replace(work, num_bytes=work.num_bytes / count)


def _weight(p: _Program, piece: Piece, start: tuple[int, ...]) -> None:
    if piece.weight is None:
        return
    after = start
    if piece.regather is not None:
        after = (*start, p.put(f"{piece.name} regather", "tp", piece.regather, start, role=WEIGHT))
    p.put(f"{piece.name} weight gradient", piece.queue, piece.weight, after, role=WEIGHT)


def _ring(p: _Program, piece: Piece, block: Work, moves: RingMoves, merge: Work | None, again: bool) -> None:
    """Blocks circulate: while one is worked on, the next arrives (Ring Attention, 2310.01889). What a block adds to the
    results of those before it is merged with them before the next is worked on; what comes home at the end is waited
    for."""
    arrived, worked = p.last, p.last
    for step in range(piece.ring):
        worked = (p.put(f"{piece.name} {step + 1}/{piece.ring}", piece.queue, block, arrived, again),)
        if step and merge is not None:
            worked = (p.put(f"{piece.name} merge {step}", piece.queue, merge, worked, again),)
        if step + 1 < piece.ring:
            move = moves.each if step else moves.first
            arrived = (p.put(f"{piece.name} exchange {step + 1}", moves.queue, move, arrived, again),)
    if moves.last is not None:
        worked = (p.put(f"{piece.name} exchange home", moves.queue, moves.last, worked, again),)
    p.last = worked
