"""Items: the form in which work arrives at a model, whatever the workload.

A workload gives each microbatch as a :data:`Batch` of items (:meth:`meshwright.spec.workload.Train.microbatch`), and
nothing below the workload reads anything else of how long its sequences are. A step of equal sequences is one kind of
item many times; documents of other lengths, requests that are prefilled and tokens that are decoded are further kinds.
"""

from __future__ import annotations

import msgspec

#: Tokens that are computed and not trained on, because rows are filled up with them.
PADDING = "padding"


class Item(msgspec.Struct, frozen=True, cache_hash=True):
    """One run of tokens that attends to itself alone: ``new_tokens`` are computed in this pass.

    ``context`` is what its last token attends to: as many as ``new_tokens`` for a document, more where a cache holds
    earlier ones, and less where it stands for several documents of so many tokens (on average by token). ``kind``:
    ``text``, or :data:`PADDING`.
    """

    new_tokens: int
    context: float
    kind: str = "text"


#: Items, each so many times. Order and grouping matter: equal batches share one price.
Batch = tuple[tuple[Item, int], ...]


def num_tokens(batch: Batch) -> int:
    """Return the tokens that a pass over the batch computes."""
    return sum(item.new_tokens * count for item, count in batch)


def useful_tokens(batch: Batch) -> int:
    """Return the tokens of the batch that are not padding."""
    return sum(item.new_tokens * count for item, count in batch if item.kind != PADDING)


def document(tokens: int, kind: str = "text") -> Item:
    """Return the item of a document of so many tokens."""
    return Item(tokens, float(tokens), kind)
