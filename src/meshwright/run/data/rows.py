"""A corpus in packed rows: what ``pack=`` lays into each (:mod:`meshwright.assign.packing`), as tokens and targets.

Documents that are longer than a sequence are cut into pieces, each a document of its own whose last target is the
text's next token. Attention stays within a document, positions begin at 0 in each, and nothing is learnt from padding
or from what would come after a document's end.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.packing import Laid, cut, lay, shape
from meshwright.spec.workload import Train

#: The target of a token that nothing is learnt from.
NOTHING = -1


class PackedRows(msgspec.Struct, frozen=True, kw_only=True):
    """``laid`` rows of pieces of a corpus; piece i of ``first`` int64 [pieces] begins at that token of it. ``ends``:
    whether a token is the last of its document, or one before a token that is not learnt: it has no target.
    ``together`` rows are shuffled as one: a row, or a global batch. A microbatch has so many ``at_once``."""

    packing: str
    laid: Laid
    first: NDArray[np.int64]
    ends: NDArray[np.bool_]
    together: int
    at_once: int = 1

    @property
    def num_groups(self) -> int:
        return self.laid.num_rows // self.together

    def arrays(
        self, tokens: NDArray[Any], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return tokens [n, row tokens + 1] (the last and padding are 0), targets, positions and the number of each
        token's document within its row, [n, row tokens] each."""
        laid, width = self.laid, self.laid.row_tokens
        out, targets = np.zeros((len(rows), width + 1), np.int64), np.full((len(rows), width), NOTHING)
        positions, documents = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            at = 0
            for number, piece in enumerate(range(laid.row_ptr[row], laid.row_ptr[row + 1])):
                length = int(laid.length[piece])
                begin = int(self.first[laid.document[piece]])
                here, there = slice(at, at + length), slice(begin, begin + length)
                out[i, here] = tokens[there]
                following = np.append(tokens[begin + 1 : begin + length + 1], 0)[:length]
                targets[i, here] = np.where(self.ends[there], NOTHING, following)
                positions[i, here] = np.arange(length)
                documents[i, here] = number
                at += length
            documents[i, at:] = laid.row_ptr[row + 1] - laid.row_ptr[row]
        return out, targets, positions, documents

    def num_targets(self, rows: NDArray[np.int64]) -> int:
        """Return the tokens of these rows that something is learnt from."""
        laid = self.laid
        total = 0
        for row in rows:
            pieces = slice(laid.row_ptr[row], laid.row_ptr[row + 1])
            for begin, length in zip(self.first[laid.document[pieces]].tolist(), laid.length[pieces].tolist()):
                total += length - int(np.count_nonzero(self.ends[begin : begin + length]))
        return total


def packed(
    starts: NDArray[np.int64], num_tokens: int, train: Train, microbatch: int, learnt: NDArray[np.uint8] | None = None
) -> PackedRows | None:
    """Return the rows of a corpus whose documents begin at `starts`, and of whose tokens some are `learnt` (all: None);
    None where documents are concatenated."""
    if train.packing in ("", "concat"):
        return None
    row_tokens, rows, at_once = shape(train, microbatch)
    found = laid_out(starts, num_tokens, train.packing, train.seq_len, row_tokens, rows, learnt)
    return msgspec.structs.replace(found, at_once=at_once)


def laid_out(
    starts: NDArray[np.int64],
    num_tokens: int,
    packing: str,
    seq_len: int,
    row_tokens: int,
    rows: int,
    learnt: NDArray[np.uint8] | None,
) -> PackedRows:
    """Return the rows of `row_tokens` tokens that a way of packing makes of documents, in pieces of `seq_len`, with so
    many `rows` a step."""
    lengths = np.diff(np.append(starts, num_tokens))
    pieces = cut(lengths, seq_len)[1]
    inside = np.cumsum(pieces) - pieces  # documents lie one behind the other, and so do their pieces
    ends = np.zeros(num_tokens, np.bool_)
    ends[starts[1:] - 1] = True
    ends[-1:] = True
    if learnt is not None:
        ends[:-1] |= learnt[1:] == 0
    laid = lay(pieces, packing, row_tokens, rows)
    together = rows if packing == "balanced" else 1
    return PackedRows(packing=packing, laid=laid, first=inside, ends=ends, together=together)
