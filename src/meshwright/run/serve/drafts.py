"""Drafts: guesses of the tokens that follow, which the model verifies in one iteration (Leviathan et al. 2211.17192).

A guess counts where it is the token that the model chooses itself at that place, with the random number of that place:
answers are those of plain decoding, drawn or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.run.serve.sequence import ServedSequence
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.serving.batching import Share

#: Lengths of the n-grams that are looked up, the longest first.
NGRAMS = (3, 2)

#: A sequence with its part of an iteration and its block table.
Asked = tuple[ServedSequence, Share, Sequence[int]]


class NgramDrafter:
    """A drafter that goes on as the text did the last time that its last tokens stood in it (prompt lookup)."""

    def guess(self, asked: Sequence[Asked]) -> list[list[int]]:
        """Return up to as many guesses as each share was drafted."""
        return [self._of(one, share.drafted) for one, share, _ in asked]

    def _of(self, one: ServedSequence, count: int) -> list[int]:
        tokens, seen = one.tokens, one.seen
        for end in range(one.looked, len(tokens)):  # where each n-gram last ended, the newest apart
            for n in NGRAMS:
                if end >= n:
                    seen[tuple(tokens[end - n : end])] = end
        one.looked = len(tokens)
        for n in NGRAMS:
            at = seen.get(tuple(tokens[-n:]))
            if at is not None and len(tokens) >= n:
                return tokens[at : at + count]
        return []

    def follow(self, others: Sequence[Asked]) -> None:
        """Nothing has to be known of other sequences."""

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Nothing lies in blocks."""


class ModelDrafter:
    """A drafter that is a smaller model, with keys and values in the blocks of the same tables.

    Of the tokens whose keys and values the model has it has those too, but for the last guess of a round, which it
    computes with the first of the next."""

    def __init__(self, layers: ServedLayers):
        self.layers = layers

    def guess(self, asked: Sequence[Asked]) -> list[list[int]]:
        """Return as many guesses as each share was drafted, the likeliest tokens."""
        found: list[list[int]] = [[] for _ in asked]
        fed = [one.tokens[min(one.drafted, share.past) : share.past + 1] for one, share, _ in asked]
        begin = [share.past + 1 - len(some) for (_, share, _), some in zip(asked, fed)]
        while True:
            going = [i for i, (_, share, _) in enumerate(asked) if len(found[i]) < share.drafted]
            if not going:
                break
            rows = [PackedRow(len(fed[i]), begin[i], asked[i][2]) for i in going]
            for i, token in zip(going, self._likeliest(rows, [fed[i] for i in going])):
                begin[i] += len(fed[i])
                found[i].append(token)
                fed[i] = [token]
        for (one, _, _), at in zip(asked, begin):
            one.drafted = at
        return found

    def _likeliest(self, rows: list[PackedRow], tokens: list[list[int]]) -> list[int]:
        wanted, end = [], 0
        for row in rows:
            end += row.new
            wanted.append(end - 1)
        positions = [at for row in rows for at in range(row.past, row.past + row.new)]
        packed = PackedTokens([token for some in tokens for token in some], positions, rows, wanted)
        return self.layers(packed).argmax(-1).tolist()

    def follow(self, others: Sequence[Asked]) -> None:
        """Compute the same tokens, so that later guesses have their keys and values."""
        if not others:
            return
        rows, tokens = [], []
        for one, share, table in others:
            begin = min(one.drafted, share.past) if share.past else 0
            if share.new > 1 or begin > share.past:
                begin = share.past
            rows.append(PackedRow(share.past + share.new - begin, begin, table))
            tokens.append(one.tokens[begin : share.past + share.new])
            one.drafted = share.past + share.new
        self._likeliest(rows, tokens)

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks as the model does."""
        self.layers.kv.copy(copies, dropped)
