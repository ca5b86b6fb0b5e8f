"""A mixture: several texts, each with the share of the sequences that are trained on.

Which text has the next sequence is decided by Webster's method (also that of Sainte-Lague): of a text with the share w,
sequence number m is due at the time (m + 1/2) / w, and sequences are trained in the order of their times. So after any
number n of sequences, of k texts each has had within (1 + k w) / 2 of its n w. Within itself a text is in the order
that it has alone, an epoch after the other, as many as it takes. What a step trains on is a function of the seed and
the step, as it is of one text: there is nothing to be kept for going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.run.data.corpus import Batch, Corpus, halves, targets_of
from meshwright.spec.lengths import Lengths, of_shares


class TextTurns(NamedTuple):
    """Which text has each of some sequences, and the number of the sequence among those of its text."""

    source: NDArray[np.int64]
    number: NDArray[np.int64]


def turns(weights: Sequence[float], first: int, count: int) -> TextTurns:
    """Return the turns of `count` sequences from the one at `first` on, of texts whose shares are `weights`, which sum
    to 1: without those before being worked out."""
    source, due, number, passed = [], [], [], 0
    early = max(0.0, first - len(weights))  # by then at most `first` sequences were due
    late = first + count + len(weights)
    for at, weight in enumerate(weights):
        begin = _due_by(early, weight)
        mine = np.arange(begin, _due_by(late, weight) + 1)
        passed += begin
        source.append(np.full(len(mine), at))
        number.append(mine)
        due.append((mine + 0.5) / weight)
    times, sources = np.concatenate(due), np.concatenate(source)
    order = np.lexsort((sources, times))[first - passed : first - passed + count]
    return TextTurns(sources[order], np.concatenate(number)[order])


def _due_by(time: float, weight: float) -> int:
    """Return the number of sequences of a text that are due by a time, as their times are rounded."""
    count = max(0, int(time * weight + 0.5))
    while count and (count - 0.5) / weight > time:
        count -= 1
    while (count + 0.5) / weight <= time:
        count += 1
    return count


class MixedText(msgspec.Struct, frozen=True, kw_only=True):
    """Texts with their shares, which sum to 1; as one :class:`~.corpus.Corpus` to what trains on it."""

    sources: tuple[Corpus, ...]
    weights: tuple[float, ...]

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.sources[0].global_batch

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.sources[0].seq_len

    @property
    def num_sequences(self) -> int:
        """Sequences of all texts together."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def rows(self) -> object | None:
        """Packed rows, where the texts are in such; None where documents are concatenated."""
        return self.sources[0].rows

    @property
    def bounded(self) -> bool:
        """Whether batches say documents."""
        return any(source.bounded for source in self.sources)

    def batch(self, step: int, dp_index: int = 0, dp_size: int = 1) -> Batch:
        """The share of data-parallel rank `dp_index` of step `step`, as a corpus has it."""
        return self.share(step * self.global_batch, self.global_batch, dp_index, dp_size)

    def share(self, first: int, count: int, dp_index: int = 0, dp_size: int = 1) -> Batch:
        """The share of a data-parallel rank of `count` sequences of the endless order, from the one at `first` on.

        Raises:
            ValueError: `dp_size` does not divide the count.
        """
        if count % dp_size:
            raise ValueError(f"a global batch of {count} does not divide by {dp_size}")
        every, rows = turns(self.weights, first, count), count // dp_size
        mine = slice(dp_index * rows, (dp_index + 1) * rows)
        found = [
            (np.flatnonzero(every.source[mine] == at), source.numbered(every.number[mine][every.source[mine] == at]))
            for at, source in enumerate(self.sources)
        ]
        said = any(source.says_targets for source in self.sources)
        learnt = (
            sum(s.num_targets(every.number[every.source == at]) for at, s in enumerate(self.sources)) if said else 0
        )
        return _together([one for one in found if len(one[0])], rows, learnt)

    def lengths(self) -> Lengths | None:
        """Lengths of the documents with their shares among those that are trained on."""
        shares: dict[int, float] = {}
        for source, weight in zip(self.sources, self.weights):
            own = source.lengths()
            if own is None:
                return None
            for tokens, share in zip(own.tokens, own.share):
                shares[tokens] = shares.get(tokens, 0.0) + weight * share / own.mean
        return of_shares(shares)

    def held_out(self, share: float) -> tuple[MixedText, MixedText]:
        """Divide every text in two as :func:`~.corpus.held_out` divides one.

        Raises:
            ValueError: one of the parts has no sequence.
        """
        parts = [halves(source, share, least=1) for source in self.sources]
        train, judged = (msgspec.structs.replace(self, sources=tuple(some)) for some in zip(*parts))
        if min(train.num_sequences, judged.num_sequences) < self.global_batch:
            raise ValueError(f"{judged.num_sequences:,} sequences are held out, and a batch has {self.global_batch:,}")
        return train, judged


def _together(found: list[tuple[NDArray[np.int64], Batch]], rows: int, num_targets: int) -> Batch:
    """The rows of several texts, each at its places, as one batch; what one of them says is said of all."""
    tokens = torch.empty((rows, found[0][1].tokens.shape[1]), dtype=torch.int64)
    width = tokens.shape[1] - 1
    documents = targets = positions = None
    if any(one.documents is not None for _, one in found):
        documents = torch.zeros((rows, width), dtype=torch.int32)
    if num_targets:
        targets = torch.empty((rows, width), dtype=torch.int64)
    if any(one.positions is not None for _, one in found):
        positions = torch.empty((rows, width), dtype=torch.int64)
    for at, one in found:
        tokens[at] = one.tokens
        if one.documents is not None:
            documents[at] = one.documents
        if targets is not None:
            targets[at] = targets_of(one)
        if one.positions is not None:
            positions[at] = one.positions
    return Batch(tokens, documents, targets, positions, num_targets)
