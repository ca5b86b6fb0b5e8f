"""Layers, and head and loss, in portions of the sequence (StreamBP, Luo et al. 2506.03077).

A portion is the same layer on other items: some tokens of every sequence whose last one attends to all before it. So
its pieces, and with them kernels, operations and bytes, come from where a whole layer's do. Before the first portion of
a recomputed layer its keys and values are computed for the whole sequence; portions follow from the last to the first,
and each is run forward and backward before the next, so that one portion's activations are held at a time.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from meshwright.layers.pieces import Context, Piece
from meshwright.lower.state import Activations
from meshwright.spec.items import Item
from meshwright.work import Elementwise, Gemm


def portions_of(c: Context, count: int) -> tuple[Context, ...]:
    """Return the ranks of `c` at work on each of `count` portions of every sequence, the first tokens first."""
    return tuple(msgspec.structs.replace(c, batch=_portion(c, i, count)) for i in range(count))


def _portion(c: Context, i: int, count: int) -> tuple[tuple[Item, int], ...]:
    found = []
    for item, many in c.batch:
        start, end = item.new_tokens * i // count, item.new_tokens * (i + 1) // count
        if end > start:
            found.append((Item(end - start, _context(item, end - start, end), item.kind), many))
    return tuple(found)


def _context(item: Item, tokens: int, end: int) -> float:
    """Return the tokens that the last of a portion's attends to. An item of several documents is the same everywhere:
    its tokens attend to half a document on average, wherever portions are cut."""
    if item.context >= item.new_tokens:
        return item.context - item.new_tokens + end
    return item.context if item.context < tokens else (item.context + tokens) / 2


def keys_and_values(pieces: list[Piece]) -> list[Piece]:
    """Return the forward of a whole layer up to its attention's core, without what makes queries."""
    core = next(i for i, piece in enumerate(pieces) if piece.core)
    made = next(piece.outputs for piece in pieces[:core] if len(piece.outputs) > 1)
    out = []
    for piece in pieces[:core]:
        work = piece.forward
        if isinstance(work, Gemm) and piece.outputs == made:
            work = msgspec.structs.replace(work, n=round(work.n * sum(made[1:]) / sum(made)))
        elif isinstance(work, Elementwise) and work.operator == "rotary":
            work = msgspec.structs.replace(work, num_bytes=work.num_bytes * made[1] / (made[0] + made[1]))
        out.append(msgspec.structs.replace(piece, forward=work))
    return out


def _saved(pieces: list[Piece]) -> float:
    return sum(piece.saved + piece.core_saved for piece in pieces)


def layer_activations(c: Context, whole: list[Piece], portions: list[list[Piece]]) -> Activations:
    """Return the activation bytes of a layer that is recomputed in portions: its input stays; while it is recomputed
    there are one portion's activations, keys and values of the whole sequence and twice their gradients (the sums, and
    what one portion adds to them), and the gradients that come in and go out. Its forward holds what two neighbouring
    steps read of the whole sequence."""
    made = next(piece.outputs for piece in whole if len(piece.outputs) > 1)
    passing = 2 * c.tokens * c.hidden * c.element
    forward = max(a.saved + b.saved for a, b in pairwise(whole))
    again = max(map(_saved, portions)) + 3 * sum(made[1:])
    held = sum(piece.held + piece.gradient for piece in whole)
    return Activations(saved=c.shard_tokens * c.hidden * c.element, held=held, working=max(forward, again) + passing)


def loss_activations(c: Context, portions: list[list[Piece]]) -> Activations:
    """Return the activation bytes of head and loss in portions: what enters stays; while one portion is computed, so do
    its scores and their gradients, and beside it the gradient that goes out."""
    widest = max(
        _saved(some) + max((p.saved if p.working is None else p.working) + p.gradient for p in some)
        for some in portions
    )
    entry = c.shard_tokens * c.hidden * c.element
    return Activations(saved=entry, working=widest + 2 * entry)
