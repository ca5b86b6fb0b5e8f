"""The part of an answer that says how steps differ between drawn batches."""

from __future__ import annotations

import msgspec

from meshwright.simulate.batches import GroupUse


class BatchSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How step times differ between ``num_draws`` drawn batches, in seconds: their mean, which is the answer's step
    time, and quantiles; ``unequal_s`` of the mean is waiting that unequal microbatches cause. Of a step's tokens
    ``useful_tokens`` (the share ``useful``) are those of ``documents``, the others padding. ``gap``: how far the
    assignment of documents may be from the best, 0 where none is made. ``groups``: of ranks, where they are formed for
    every batch."""

    packing: str
    num_draws: int
    mean_s: float
    p10_s: float
    p50_s: float
    p90_s: float
    unequal_s: float
    useful_tokens: float
    useful: float
    documents: float
    gap: float
    groups: GroupUse | None = None
