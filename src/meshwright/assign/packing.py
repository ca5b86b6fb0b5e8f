"""Documents into rows: what ``pack=`` of a workload means, for the batches that are predicted and those that are run.

A row is what attention and the losses see as one line of tokens. ``packed`` and ``padded`` and ``concat`` rows are as
long as a sequence; a ``balanced`` microbatch is one row of as many tokens as its sequences would have. What documents
leave empty at a row's end is padding, a document of its own that nothing is learnt from.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Assigned, Problem, solve
from meshwright.spec.workload import OVER_BATCHES, REORDERED, Train


class PackShape(NamedTuple):
    """``row_tokens`` of each row, ``rows`` of a global batch, ``together`` of them a microbatch."""

    row_tokens: int
    rows: int
    together: int


class Laid(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of documents. Row r holds pieces ``row_ptr[r]`` to ``row_ptr[r + 1]`` one behind the other: ``length``
    tokens of ``document`` from its token ``start`` on, int64 [pieces] each. ``value`` and ``bound`` are of the
    assignment: rows, or the cost of the costliest microbatch of each global batch, summed; 0 where nothing was
    assigned."""

    row_tokens: int
    row_ptr: NDArray[np.int64]
    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    value: float = 0.0
    bound: float = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.row_ptr) - 1

    @property
    def gap(self) -> float:
        """How far the assignment may be from the best: 0.02 is 2%."""
        return self.value / self.bound - 1.0 if self.bound else 0.0

    @property
    def filled(self) -> NDArray[np.int64]:
        """Tokens of documents in each row, int64 [rows]."""
        upto = np.concatenate([[0], np.cumsum(self.length)])
        return upto[self.row_ptr[1:]] - upto[self.row_ptr[:-1]]


def shape(train: Train, microbatch: int) -> PackShape:
    """Return the rows of a global batch of `train` in microbatches of so many sequences."""
    together = train.rows(microbatch)
    joined = microbatch // together
    return PackShape(train.seq_len * joined, train.global_batch // joined, together)


def taken(rows: int, index: int, size: int, packing: str, together: int = 1) -> NDArray[np.int64]:
    """Return which of a global batch's rows data-parallel rank `index` of `size` takes, in its order: consecutive ones.
    ``balanced`` rows, the costliest first, are assigned in turn, there and back, so that the work of ranks is alike at
    every moment and in all; so are ``reordered`` ones, in microbatches of so many `together`, of which each rank takes
    the cheapest first and last (:func:`cheap_ends`)."""
    each = rows // size
    if packing not in OVER_BATCHES:
        return np.arange(index * each, (index + 1) * each)
    turn = np.arange(each // together)
    turn = cheap_ends(len(turn)) if packing == REORDERED else turn
    found = turn * size + np.where(turn % 2 == 0, index, size - 1 - index)
    return (found[:, None] * together + np.arange(together)).ravel()


def cheap_ends(count: int) -> NDArray[np.int64]:
    """Return an order of microbatches, of which 0 is the costliest: the cheapest first, the next cheapest last, and so
    on to the costliest in the middle. All other stages of a pipeline wait for the first microbatch's forward and for
    the last one's backward, as DistTrain puts them in order (Zhang et al. 2408.04275, from its abstract)."""
    order = np.arange(count)[::-1]
    return np.concatenate([order[::2], order[1::2][::-1]])


def costliest_first(laid: Laid, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return some rows with those first whose documents have the most attention, padding included."""
    pieces = np.concatenate([[0.0], np.cumsum(attention_cost(laid.length))])
    cost = pieces[laid.row_ptr[rows + 1]] - pieces[laid.row_ptr[rows]]
    cost += attention_cost(laid.row_tokens - laid.filled[rows])
    return rows[np.argsort(-cost, kind="stable")]


def attention_cost(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the score entries of documents, to a factor: the square of their lengths."""
    return lengths.astype(np.float64) ** 2


def lay(lengths: NDArray[np.int64], packing: str, row_tokens: int, rows: int) -> Laid:
    """Return documents of these `lengths` [N] laid into rows of `row_tokens`, in the order they are given where the
    packing leaves one. Of ``balanced`` rows, every `rows` in a row are one global batch, and what is left over at the
    end fills none; of the others all documents are laid, but for ``concat``, whose last row may be left out.

    Raises:
        ValueError: a document that is longer than a row and may not be cut.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    if packing == "concat":
        return _concat(lengths, row_tokens)
    if len(lengths) and lengths.max() > row_tokens:
        raise ValueError(f"a document of {lengths.max()} tokens does not fit a row of {row_tokens}")
    if packing == "padded":
        return _rows(lengths, np.arange(len(lengths)), len(lengths), row_tokens)
    if packing == "balanced":
        return _balanced(lengths, row_tokens, rows)
    found = solve("first-fit", Problem(sizes=lengths, capacity=row_tokens))
    return _rows(lengths, found.bin_of, found.num_bins, row_tokens, found.value, found.bound)


def cut(lengths: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return documents cut into pieces of at most `most` tokens: (document, length) of each piece, in order."""
    pieces = -(-lengths // most)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return document, np.minimum(most, lengths[document] - number * most)


def _rows(
    lengths: NDArray[np.int64],
    row_of: NDArray[np.int64],
    num_rows: int,
    tokens: int,
    value: float = 0,
    bound: float = 0,
) -> Laid:
    """Return whole documents in the rows they were assigned to, those of a row by their number."""
    order = np.argsort(row_of, kind="stable")
    order = order[np.searchsorted(row_of[order], 0) :]  # -1 are in no row
    row_ptr = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return Laid(
        row_tokens=tokens,
        row_ptr=row_ptr,
        document=order,
        start=np.zeros(len(order), np.int64),
        length=lengths[order],
        value=value,
        bound=bound,
    )


def _concat(lengths: NDArray[np.int64], row_tokens: int) -> Laid:
    """Return documents one behind the other, cut where a row ends; what does not fill a last row is left out."""
    ends = np.cumsum(lengths)
    num_rows = int(ends[-1]) // row_tokens if len(ends) else 0
    used = num_rows * row_tokens
    cuts = np.unique(np.concatenate([[0], ends[ends < used], np.arange(0, used + 1, row_tokens)]))
    begin = cuts[:-1]
    document = np.searchsorted(ends, begin, side="right")
    return Laid(
        row_tokens=row_tokens,
        row_ptr=np.searchsorted(begin, np.arange(num_rows + 1) * row_tokens),
        document=document,
        start=begin - (ends - lengths)[document],
        length=np.diff(cuts),
    )


def _balanced(lengths: NDArray[np.int64], row_tokens: int, rows: int) -> Laid:
    """Return global batches of `rows` rows each: documents are taken in order while they fit all rows together, and
    assigned by attention; those that no row has room for go on to the next batch."""
    costs, total = attention_cost(lengths), np.concatenate([[0], np.cumsum(lengths)])
    row_of = np.full(len(lengths), -1, np.int64)
    waiting, next_, first = np.zeros(0, np.int64), 0, 0
    value = bound = 0.0
    while True:
        room = rows * row_tokens - int(lengths[waiting].sum())
        upto = max(next_, int(np.searchsorted(total, total[next_] + room, side="right")) - 1)
        if upto == len(lengths):  # the rest fills no batch
            return _rows(lengths, row_of, first, row_tokens, value, bound)
        taken, next_ = np.concatenate([waiting, np.arange(next_, upto)]), upto
        found = _dealt(lengths[taken], costs[taken], row_tokens, rows)
        row_of[taken] = np.where(found.bin_of >= 0, first + found.bin_of, -1)
        waiting, first = taken[found.bin_of < 0], first + rows
        value, bound = value + found.value, bound + found.bound


def _dealt(lengths: NDArray[np.int64], costs: NDArray[np.float64], row_tokens: int, rows: int) -> Assigned:
    return solve("heaviest-first", Problem(sizes=lengths, capacity=row_tokens, costs=costs, num_bins=rows))
