"""The corpus: tokens of documents on disk, and which of them a step trains on.

Documents stand one behind the other, each closed by the tokenizer's end, and are cut into sequences of ``seq_len``
tokens; one token more is the target of the last. A sequence's positions carry the number of their document, so that
attention never crosses a boundary ("Packing", as in Krell et al. 2107.02027 without their reordering).

What a step trains on is a pure function of (seed, step): every epoch visits each sequence once, in an order that a
keyed permutation gives without being stored, and the step's global batch is the same whatever the plan is; a
data-parallel rank takes its share of the rows. To resume is to know the step.

Other ways to fill sequences (``pack=`` of the workload) lay whole documents into rows (:mod:`.rows`). ``Train.lengths``
does not shape the data: it is what a prediction supposes about the documents, while the corpus has the lengths that it
has. :meth:`Corpus.lengths` says those in the same record, for a prediction of this corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.assign.packing import costliest_first, cut, taken
from meshwright.atomic import write_bytes
from meshwright.run.data.rows import NOTHING, PackedRows, laid_out
from meshwright.spec.lengths import Lengths, of_counts
from meshwright.spec.workload import REORDERED

ROUNDS = 6
#: Batches that a held-out loss is the mean of, at most.
BATCHES = 8
_MASK = (1 << 64) - 1


class Batch(NamedTuple):
    """Sequences of one data-parallel rank in one step: ``tokens`` int64 [n, seq_len + 1], ``documents`` int32
    [n, seq_len], the number within its sequence of the document that a position belongs to; None when the corpus is
    one document, or boundaries are off.

    Packed rows also say ``targets`` int64 [n, seq_len], negative where nothing is learnt, ``positions`` int64 [n,
    seq_len], which begin anew in each document, and ``num_targets``, how many targets the global batch has. Else each
    token's target is the next one, and positions are those of the sequence."""

    tokens: torch.Tensor
    documents: torch.Tensor | None
    targets: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    num_targets: int = 0

    def taking(self, rows: Sequence[int]) -> Batch:
        """Some rows of the batch, in this order."""
        some = list(rows)
        columns = (None if column is None else column[some] for column in self[:4])
        return Batch(*columns, self.num_targets)


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised corpus in sequences. ``tokens`` [N] and ``starts`` [documents], ascending, lie on disk. ``rows`` are
    those of a packing that keeps documents whole, ``global_batch`` of them a step. Steps take turns on ``clusters``,
    equal runs of the text; 0 for none. ``learnt`` [N]: whether a token is learnt, of conversations."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    largest: int
    seq_len: int
    global_batch: int
    seed: int = 0
    boundaries: bool = True
    rows: PackedRows | None = None
    clusters: int = 0
    learnt: NDArray[np.uint8] | None = None

    @property
    def num_sequences(self) -> int:
        """Whole sequences with a target for each of their tokens; what is left over at the end is not trained on."""
        if self.rows is not None:
            return self.rows.num_groups * self.rows.together
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def bounded(self) -> bool:
        """Whether batches say documents: there are several, and boundaries are on."""
        return self.boundaries and len(self.starts) > 1

    def batch(self, step: int, dp_index: int = 0, dp_size: int = 1) -> Batch:
        """The share of data-parallel rank `dp_index` of step `step`, counted from 0: rows [dp_index, dp_index + 1) *
        global_batch / dp_size of the global batch, and of balanced ones those that it is assigned.

        Raises:
            ValueError: `dp_size` does not divide the global batch.
        """
        if self.clusters:
            turn, part = divmod(step, self.clusters)
            return self.share(turn * self.global_batch, self.global_batch, dp_index, dp_size, part=part)
        if self.rows is None or self.global_batch % dp_size:
            return self.share(step * self.global_batch, self.global_batch, dp_index, dp_size)
        return self._packed(self.rows, step, self._taken(self.rows, dp_index, dp_size))

    def own(self, step: int, part: int, parts: int, among: int = 0, of: int = 1, rows: int = 1) -> Batch:
        """The `rows` of one of `of` ranks, that at `among`, in step `step` of a replica that has the run `part` of the
        text alone, one of `parts` equal ones."""
        apart = msgspec.structs.replace(self, clusters=parts)
        return apart.share(step * of * rows, of * rows, among, of, part=part)

    def share(self, first: int, count: int, dp_index: int = 0, dp_size: int = 1, *, part: int = 0) -> Batch:
        """The share of a data-parallel rank of `count` sequences of the endless order, from the one at `first` on; with
        clusters, of the order of the cluster `part`, one of as many equal runs of the text.

        Raises:
            ValueError: `dp_size` does not divide the count.
        """
        if count % dp_size:
            raise ValueError(f"a global batch of {count} does not divide by {dp_size}")
        rows = count // dp_size
        size = max(1, self.num_sequences // max(1, self.clusters))
        every = sequences(np.arange(first, first + count), size, self.seed) + part * size
        mine = self.sequences_at(every[dp_index * rows : (dp_index + 1) * rows])
        return mine if self.learnt is None else mine._replace(num_targets=self._num_learnt(every))

    def _num_learnt(self, chosen: NDArray[np.int64]) -> int:
        at = chosen[:, None] * self.seq_len + np.arange(1, self.seq_len + 1)
        return int(self.learnt[at].sum())

    def sequences_at(self, chosen: NDArray[np.int64]) -> Batch:
        """Whole sequences [n] of the text, counted from its beginning."""
        at = chosen[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        numbers = torch.from_numpy(self._documents(chosen)) if self.bounded else None
        tokens = self.tokens[at].astype(np.int64)
        if self.learnt is None:
            return Batch(torch.from_numpy(tokens), numbers)
        targets = torch.from_numpy(np.where(self.learnt[at[:, 1:]] > 0, tokens[:, 1:], NOTHING))
        return Batch(torch.from_numpy(tokens), numbers, targets, num_targets=self._num_learnt(chosen))

    @property
    def says_targets(self) -> bool:
        """Whether batches say what is learnt."""
        return self.rows is not None or self.learnt is not None

    def numbered(self, places: NDArray[np.int64]) -> Batch:
        """The sequences, or packed rows, at some places of the endless order of epochs."""
        chosen = sequences(places, max(1, self.num_sequences), self.seed)
        if self.rows is None:
            return self.sequences_at(chosen)
        tokens, targets, positions, numbers = map(torch.from_numpy, self.rows.arrays(self.tokens, chosen))
        return Batch(tokens, numbers, targets, positions, self.rows.num_targets(chosen))

    def num_targets(self, places: NDArray[np.int64]) -> int:
        """Return the tokens that are learnt of the sequences at some places of the endless order."""
        if self.rows is None and self.learnt is None:
            return len(places) * self.seq_len
        chosen = sequences(places, max(1, self.num_sequences), self.seed)
        return self._num_learnt(chosen) if self.rows is None else self.rows.num_targets(chosen)

    def _taken(self, rows: PackedRows, dp_index: int, dp_size: int) -> NDArray[np.int64]:
        """Which of a step's rows a data-parallel rank takes."""
        return taken(self.global_batch, dp_index, dp_size, rows.packing, rows.at_once)

    def _packed(self, rows: PackedRows, step: int, mine: NDArray[np.int64]) -> Batch:
        """The rows `mine` of a step's packed rows; groups of rows are permuted as sequences are."""
        groups = self.global_batch // rows.together
        chosen = sequences(np.arange(step * groups, (step + 1) * groups), rows.num_groups, self.seed)
        every = (chosen[:, None] * rows.together + np.arange(rows.together)).ravel()
        every = costliest_first(rows.laid, every) if rows.packing == REORDERED else every
        tokens, targets, positions, numbers = map(torch.from_numpy, rows.arrays(self.tokens, every[mine]))
        return Batch(tokens, numbers, targets, positions, rows.num_targets(every))

    def _documents(self, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        """[n, seq_len]: boundaries passed since the sequence began."""
        out = np.zeros((len(chosen), self.seq_len), np.int32)
        for row, first in zip(out, chosen * self.seq_len):
            inner = self.starts[slice(*np.searchsorted(self.starts, (first + 1, first + self.seq_len)))]
            row[inner - first] = 1
            np.cumsum(row, out=row)
        return out

    def lengths(self) -> Lengths | None:
        """Lengths of the documents with their shares, in pieces where packed rows hold pieces; None where batches say
        no documents."""
        if self.rows is None and not self.bounded:
            return None
        lengths = np.diff(np.append(self.starts, len(self.tokens)))
        if self.rows is not None:
            lengths = cut(lengths, self.seq_len)[1]
        tokens, count = np.unique(lengths, return_counts=True)
        return of_counts(dict(zip(tokens.tolist(), count.tolist())))


def targets_of(batch: Batch) -> torch.Tensor:
    """The targets of a batch, int64 [n, seq_len]."""
    return batch.tokens[:, 1:] if batch.targets is None else batch.targets


def halves(corpus: Corpus, share: float, *, least: int) -> tuple[Corpus, Corpus]:
    """Divide a corpus in two: what there is to train on, and the last `share` of its tokens to judge by, which is in
    the same order whatever the seed.

    Raises:
        ValueError: one of the parts has less than so many sequences.
    """
    cut = len(corpus.tokens) - int(len(corpus.tokens) * share)
    before, behind = corpus.starts[corpus.starts < cut], corpus.starts[corpus.starts >= cut] - cut
    behind = np.append(0, behind[behind > 0])  # the document that the cut is in begins there anew
    parts = (
        _part(corpus, slice(0, cut), before),
        msgspec.structs.replace(_part(corpus, slice(cut, None), behind), seed=0),
    )
    if min(part.num_sequences for part in parts) < least:
        raise ValueError(f"{len(corpus.tokens):,} tokens, of which {share:.2%} are held out")
    return parts


def _part(corpus: Corpus, some: slice, starts: NDArray[np.int64]) -> Corpus:
    """A run of a corpus's tokens; documents that are kept whole are packed anew."""
    tokens, rows = corpus.tokens[some], corpus.rows
    learnt = None if corpus.learnt is None else corpus.learnt[some]
    if rows is not None:
        width = rows.laid.row_tokens
        rows = laid_out(starts, len(tokens), rows.packing, corpus.seq_len, width, corpus.global_batch, learnt)
        rows = msgspec.structs.replace(rows, at_once=corpus.rows.at_once)
    return msgspec.structs.replace(corpus, tokens=tokens, starts=starts, learnt=learnt, rows=rows)


def sequences(place: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Return the one of `count` sequences that is trained at each place of the endless order of epochs."""
    epochs, within = np.divmod(np.asarray(place, np.int64), count)
    out = np.empty_like(within)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        out[mine] = permute(within[mine], count, (seed, int(epoch)))
    return out


def judged_sequences(held: Corpus) -> NDArray[np.int64]:
    """Return the sequences of held-out text that a loss is the mean of."""
    count = min(BATCHES, held.num_sequences // held.global_batch) * held.global_batch
    return sequences(np.arange(count), held.num_sequences, held.seed)


def permute(place: NDArray[np.int64], count: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """A permutation of range(count) chosen by `key`, at the given places, without the others being worked out.

    A Feistel network over the next power of four; what falls outside walks on until it is inside (Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, keys = np.uint64((1 << half) - 1), _round_keys(key)
    out = place.astype(np.uint64)
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> np.uint64(half), out[outside] & mask
        for one in keys:
            left, right = right, left ^ (_mixed(right + one) & mask)
        out[outside] = (left << np.uint64(half)) | right
        outside = out >= count
    return out.astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(key: tuple[int, int]) -> list[np.uint64]:
    state = np.zeros(1, np.uint64)
    for word in key:
        state = _mixed(state + np.uint64((word + 0x9E3779B97F4A7C15) & _MASK))
    return [_mixed(state + np.uint64((i + 1) * 0x9E3779B97F4A7C15 & _MASK))[0] for i in range(ROUNDS)]


def write_lengths(corpus: Corpus, file: Path) -> int:
    """Write the lengths of the corpus' documents, in pieces where packed rows hold pieces, a line each: what
    ``lengths=`` of a workload reads. Returns how many there are.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    lengths = np.diff(np.append(corpus.starts, len(corpus.tokens)))
    if corpus.rows is not None:
        lengths = cut(lengths, corpus.seq_len)[1]
    write_bytes(file, ("tokens\n" + "".join(f"{n}\n" for n in lengths.tolist())).encode())
    return len(lengths)
