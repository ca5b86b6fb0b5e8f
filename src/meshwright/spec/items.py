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
    ``text``, or :data:`PADDING`. ``frames``: its tokens are those of so many frames of a video, one frame behind the
    other; some layers attend within frames, or to one place in all of them (:func:`along`).
    """

    new_tokens: int
    context: float
    kind: str = "text"
    frames: int = 1


#: The dims of a video that a layer may attend over: the places of one frame, or one place in all frames.
SPACE, TIME = "space", "time"

#: Items, each so many times. Order and grouping matter: equal batches share one price.
Batch = tuple[tuple[Item, int], ...]


def num_tokens(batch: Batch) -> int:
    """Return the tokens that a pass over the batch computes."""
    return sum(item.new_tokens * count for item, count in batch)


def useful_tokens(batch: Batch) -> int:
    """Return the tokens of the batch that are not padding."""
    return sum(item.new_tokens * count for item, count in batch if item.kind != PADDING)


def runs_along(item: Item, dim: str) -> int:
    """Return how many runs of tokens an item is to a layer that attends over one dim of a video alone."""
    return item.frames if dim == SPACE else item.new_tokens // item.frames


def along(batch: Batch, dim: str) -> Batch:
    """Return the runs of tokens that attend to themselves alone where a layer attends over ``space`` or ``time``; the
    same batch for a layer that attends over all tokens (``dim`` "")."""
    if not dim:
        return batch
    return tuple(
        (document(item.new_tokens // runs_along(item, dim), item.kind), count * runs_along(item, dim))
        for item, count in batch
    )


def document(tokens: int, kind: str = "text") -> Item:
    """Return the item of a document of so many tokens."""
    return Item(tokens, float(tokens), kind)
