"""Visibility of keys to queries, as rectangles of a rank's tokens that one kernel computes each, without a mask.

A rank holds *runs* of the sequence: one when it is cut in equal pieces, an early and a late one under a balanced
causal ring. Two runs are either all of the triangle apart (full), the same (causal), or unrelated (nothing to do).
Documents cut runs further, so that no kernel works on pairs that no document has; a sliding window is walked in
tiles, of which only the keys at its far edge need a mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: Queries a tile of a sliding window has at least.
LEAST_TILE = 128


class TokenRun(NamedTuple):
    """Consecutive positions [start, stop) of the sequence that lie next to each other on a rank."""

    start: int
    stop: int


class MaskRule(NamedTuple):
    """``causal``: keys after a query are hidden. ``window`` > 0: keys at that distance and beyond are hidden too."""

    causal: bool
    window: int = 0


class MaskBlock(NamedTuple):
    """Queries [q0, q1) of a rank's tokens against keys [k0, k1) of another's, in sequence ``row`` of the batch (None:
    in all of them). ``causal``: the lower triangle of a square. ``offset``: position of the first query minus that of
    the first key, where the rule has to be applied pair by pair; None elsewhere."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    offset: int | None = None
    row: int | None = None


def runs_of(seq_len: int, size: int, index: int, *, balanced: bool) -> tuple[TokenRun, ...]:
    """The runs of rank `index` of `size`: piece `index` of as many or, `balanced`, pieces `index` and 2 size - 1 -
    `index` of twice as many, an early one and a late one, so that every rank has the same share of the causal triangle.

    Raises:
        ValueError: the sequence does not divide into that many pieces.
    """
    pieces = 2 * size if balanced and size > 1 else size
    if seq_len % pieces:
        raise ValueError(f"a sequence of {seq_len} tokens does not divide into {pieces} pieces")
    length = seq_len // pieces
    mine = (index, pieces - 1 - index) if pieces > size else (index,)
    return tuple(TokenRun(p * length, (p + 1) * length) for p in mine)


@lru_cache(maxsize=1024)
def blocks(queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...], rule: MaskRule) -> tuple[MaskBlock, ...]:
    """Every pair that `rule` leaves between two ranks' runs, each in exactly one block, by ascending query."""
    if queries == keys and rule == MaskRule(causal=True):
        count = sum(r.stop - r.start for r in queries)  # ascending runs are a triangle, gaps between them or not
        return (MaskBlock(0, count, 0, count, causal=True),)
    return _joined(_cut(queries, keys, rule))


def document_blocks(
    queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...], rule: MaskRule, documents: torch.Tensor
) -> tuple[MaskBlock, ...]:
    """Return the blocks of :func:`blocks` without pairs that cross a boundary of documents, which are contiguous;
    `documents` [b, S] is the number of each position's document."""
    return _in_documents(queries, keys, rule, _boundaries(documents))


@lru_cache(maxsize=512)
def _in_documents(
    queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...], rule: MaskRule, rows: tuple[tuple[int, ...], ...]
) -> tuple[MaskBlock, ...]:
    each = {cuts: _in_document_row(queries, keys, rule, cuts) for cuts in rows}
    if len(each) == 1:
        return each[rows[0]]
    return tuple(block._replace(row=row) for row, cuts in enumerate(rows) for block in each[cuts])


def _in_document_row(
    queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...], rule: MaskRule, cuts: tuple[int, ...]
) -> tuple[MaskBlock, ...]:
    if len(cuts) == 2:
        return blocks(queries, keys, rule)
    return _joined(
        block
        for low, high in pairwise(cuts)
        for block in _cut(_within(queries, low, high), _within(keys, low, high), rule, queries, keys)
    )


#: (version, boundaries) of document tensors that were seen: every layer of a microbatch asks again.
_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _boundaries(documents: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Per sequence, the positions where documents begin, and the sequence's length."""
    known = _seen.get(documents)
    if known is None or known[0] != documents._version:
        length, table = documents.shape[1], documents.cpu()
        begins = (table[:, 1:] != table[:, :-1]).nonzero().tolist()
        rows: list[list[int]] = [[0] for _ in range(len(table))]
        for row, before in begins:
            rows[row].append(before + 1)
        known = _seen[documents] = (documents._version, tuple((*row, length) for row in rows))
    return known[1]


def _within(runs: tuple[TokenRun, ...], low: int, high: int) -> tuple[TokenRun, ...]:
    return tuple(TokenRun(max(r.start, low), min(r.stop, high)) for r in runs if r.start < high and r.stop > low)


def _cut(
    queries: tuple[TokenRun, ...],
    keys: tuple[TokenRun, ...],
    rule: MaskRule,
    all_queries: tuple[TokenRun, ...] | None = None,
    all_keys: tuple[TokenRun, ...] | None = None,
) -> Iterator[MaskBlock]:
    """Blocks between (parts of) runs, addressed in the ranks' whole runs."""
    place_q, place_k = _places(all_queries or queries), _places(all_keys or keys)
    for run in queries:
        for q in _split(run, keys):
            for other in keys:
                for k in _split(other, (q,)):
                    for a, b, causal, offset in _pairs(q, k, rule):
                        q0, k0 = place_q(a.start), place_k(b.start)
                        yield MaskBlock(q0, q0 + a.stop - a.start, k0, k0 + b.stop - b.start, causal, offset)


def _places(runs: tuple[TokenRun, ...]):
    """Position in the sequence -> place among a rank's tokens."""
    starts = [r.start for r in runs]
    shifts, count = [], 0
    for r in runs:
        shifts.append(count - r.start)
        count += r.stop - r.start
    return lambda position: position + shifts[bisect_right(starts, position) - 1]


def _split(run: TokenRun, others: tuple[TokenRun, ...]) -> list[TokenRun]:
    """A run cut wherever another one begins or ends, so that two pieces are the same or do not overlap."""
    points = sorted({p for o in others for p in o if run.start < p < run.stop})
    return [TokenRun(*ends) for ends in pairwise([run.start, *points, run.stop])]


def _pairs(q: TokenRun, k: TokenRun, rule: MaskRule) -> Iterator[tuple[TokenRun, TokenRun, bool, int | None]]:
    """(queries, keys, causal, offset) of the pairs left between two pieces."""
    if not rule.window:
        if not rule.causal or k.stop <= q.start:
            yield q, k, False, None
        elif k == q:
            yield q, k, True, None
        return
    step, ahead = max(LEAST_TILE, rule.window // 4), 1 if rule.causal else rule.window
    for start in range(q.start, q.stop, step):
        tile = TokenRun(start, min(q.stop, start + step))
        # keys that some query of the tile sees, and those that all of them see
        low, high = max(k.start, tile.start - rule.window + 1), min(k.stop, tile.stop - 1 + ahead)
        all_low, all_high = tile.stop - rule.window, tile.start + ahead
        if rule.causal and all_low <= tile.start:
            all_high = tile.start  # what follows is a triangle, which needs no mask
        points = sorted({p for p in (all_low, all_high) if low < p < high}) if all_low < all_high else ()
        for keys in pairwise([low, *points, high] if low < high else ()):
            if all_low <= keys[0] and keys[1] <= tile.start + ahead:
                yield tile, TokenRun(*keys), False, None
            elif rule.causal and keys == tile and all_low <= tile.start:
                yield tile, tile, True, None
            else:
                yield tile, TokenRun(*keys), False, tile.start - keys[0]


def _joined(found: Iterator[MaskBlock]) -> tuple[MaskBlock, ...]:
    """Full blocks that together are a rectangle, as one: first beside each other, then above each other."""
    out: list[MaskBlock] = []
    for block in found:
        before = out[-1] if out else None
        if before and _full(before, block) and before[:2] == block[:2] and before.k1 == block.k0:
            out[-1] = before._replace(k1=block.k1)
        else:
            out.append(block)
    merged: list[MaskBlock] = []
    for block in out:
        above = next(
            (i for i, b in enumerate(merged) if _full(b, block) and b[2:4] == block[2:4] and b.q1 == block.q0), None
        )
        if above is None:
            merged.append(block)
        else:
            merged[above] = merged[above]._replace(q1=block.q1)
    return tuple(merged)


def _full(*found: MaskBlock) -> bool:
    return not any(b.causal or b.offset is not None for b in found)


@lru_cache(maxsize=32)
def hidden(
    block_q: int, block_k: int, offset: int, rule: MaskRule, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the mask added to the scores of a block, [block_q, block_k]: 0 where a query sees a key, else -inf. Rows
    lie at multiples of 8 elements, as the kernels with a bias require."""
    distance = offset + torch.arange(block_q, device=device)[:, None] - torch.arange(block_k, device=device)
    seen = distance.abs() < rule.window if rule.window else torch.ones_like(distance, dtype=torch.bool)
    if rule.causal:
        seen &= distance >= 0
    bias = torch.zeros((block_q, -(-block_k // 8) * 8), dtype=dtype, device=device)[:, :block_k]
    return bias.masked_fill_(~seen, float("-inf"))
