"""Drawn global batches: documents of a workload's lengths, packed, as the microbatches of every data-parallel rank.

The draws of one question are packed together and their rows shuffled, as a data set is packed before it is trained on.
Equal words give equal batches.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.packing import Laid, costliest_first, lay, shape
from meshwright.errors import MeshwrightError
from meshwright.spec.items import PADDING, Batch, document
from meshwright.spec.workload import REORDERED, Train

#: Microbatches that are drawn in all, in so many global batches at least and at most.
MICROBATCHES, LEAST, MOST = 4096, 8, 32
#: Documents that are drawn in all, about, and for one global batch at most.
DOCUMENTS, MOST_DOCUMENTS = 2_000_000, 20_000_000


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """``rows`` int64 [draws, microbatches, rows of each] are the rows in ``laid`` of every drawn microbatch, in the
    order in which data-parallel ranks take them: an equal share of consecutive ones each."""

    laid: Laid
    rows: NDArray[np.int64]

    @property
    def num_draws(self) -> int:
        return len(self.rows)

    def lengths(self, draw: int, microbatch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of a microbatch's documents, and of its rows' padding where there is some."""
        laid, rows = self.laid, self.rows[draw, microbatch]
        pieces = [laid.length[laid.row_ptr[r] : laid.row_ptr[r + 1]] for r in rows]
        empty = laid.row_tokens - np.array([p.sum() for p in pieces])
        return np.concatenate(pieces), empty[empty > 0]

    def batch(self, draw: int, microbatch: int) -> Batch:
        """Return a microbatch as items, the longest first."""
        documents, padding = self.lengths(draw, microbatch)
        out = []
        for lengths, kind in ((documents, "text"), (padding, PADDING)):
            length, count = np.unique(lengths, return_counts=True)
            out += [(document(n, kind), c) for n, c in zip(length[::-1].tolist(), count[::-1].tolist())]
        return tuple(out)

    def loads(self, cost: Callable[[int], float]) -> NDArray[np.float64]:
        """Return the summed `cost` of the documents and the padding of every microbatch, by their lengths: float64
        [draws, microbatches]."""
        empty = self.laid.row_tokens - self.laid.filled
        known = np.zeros(self.laid.row_tokens + 1)
        for length in np.unique(np.concatenate([self.laid.length, empty[empty > 0]])).tolist():
            known[length] = cost(length)
        each = np.concatenate([[0.0], np.cumsum(known[self.laid.length])])
        of_row = each[self.laid.row_ptr[1:]] - each[self.laid.row_ptr[:-1]] + known[empty]
        return of_row[self.rows].sum(axis=-1)

    def documents(self) -> Batch:
        """Return the documents of all draws together, without padding."""
        chosen = np.zeros(self.laid.num_rows, np.bool_)
        chosen[self.rows.ravel()] = True
        pieces = np.repeat(chosen, np.diff(self.laid.row_ptr))
        length, count = np.unique(self.laid.length[pieces], return_counts=True)
        return tuple((document(n), c) for n, c in zip(length.tolist(), count.tolist()))

    def useful(self) -> NDArray[np.int64]:
        """Return the tokens of documents in every global batch, int64 [draws]."""
        return self.laid.filled[self.rows].sum(axis=(1, 2))


def draw(train: Train, microbatch: int) -> Drawn | None:
    """Return global batches of `train` in microbatches of so many sequences; None where its sequences are whole.

    Raises:
        MeshwrightError: W008 for a global batch of more documents than are drawn.
    """
    if train.lengths is None:
        return None
    row_tokens, rows, together = shape(train, microbatch)
    expected = rows * (1 if train.packing == "padded" else row_tokens / train.lengths.mean)
    if expected > MOST_DOCUMENTS:
        raise MeshwrightError.one(
            "W008",
            f"a global batch has {expected:,.0f} documents, and {MOST_DOCUMENTS:,} are the most that are drawn",
            place=f"--train {train.text()}",
            help="a smaller batch=, or longer documents",
        )
    num_draws = min(MOST, max(LEAST, MICROBATCHES * together // rows), max(1, int(DOCUMENTS / expected)))
    rng = np.random.default_rng(train.seed)
    needed = num_draws * rows * row_tokens
    documents = _documents(train, needed if train.packing != "padded" else 0, num_draws * rows, rng)
    laid = lay(documents, train.packing, row_tokens, rows)
    if train.packing == "balanced":
        order = np.arange(num_draws * rows)  # batches were assigned one by one
    else:
        last = int(laid.num_rows > num_draws * rows)  # may hold the few documents that were left
        order = rng.permutation(laid.num_rows - last)[: num_draws * rows]
    if train.packing == REORDERED:
        order = np.concatenate([costliest_first(laid, some) for some in order.reshape(num_draws, rows)])
    return Drawn(laid=laid, rows=order.reshape(num_draws, rows // together, together))


def _documents(train: Train, tokens: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw documents: at least `tokens` in all and two sequences of each row more, or, without tokens, `count`."""
    lengths = np.array(train.lengths.tokens, np.int64)
    share = np.array(train.lengths.share) / sum(train.lengths.share)
    if not tokens:
        return rng.choice(lengths, count, p=share)
    more = 2 * train.seq_len * (1 + count // 16)
    found = [np.zeros(0, np.int64)]
    missing = tokens + more
    while missing > 0:
        found.append(rng.choice(lengths, max(16, int(1.05 * missing / train.lengths.mean)), p=share))
        missing -= int(found[-1].sum())
    return np.concatenate(found)
