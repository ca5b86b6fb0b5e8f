"""Static batching: a batch is computed until all of its requests are answered, and only then the next one is taken.

FasterTransformer and Triton's static batcher serve like this (the baseline of Orca, Yu et al., OSDI 2022, section 2).
Requests that are answered early keep their place, and the engine computes for them in vain.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class Static(msgspec.Struct, frozen=True):
    """The policy; every request of a batch has the cache blocks of the longest of them."""

    name: str = "static"
    title: str = "one batch at a time (FasterTransformer)"
    code: int = 1
    budget: int = 0
    reserves: bool = True
    watermark: bool = False

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Go on with the batch, or take the next one."""
        if not plan.running:
            _take(plan, limits)
        for one in plan.running:
            plan.compute(one, one.need)

    def keeps(self, finished: bool, others: bool) -> bool:
        """All leave together."""
        return others


def _take(plan: NextBatch, limits: EngineLimits) -> None:
    """Admit as many as there is room for, if each were as long as the longest."""
    count = longest = held = 0
    adapters, brought = plan.cache.adapters, set()
    chosen = list(islice(plan.waiting, limits.max_batch))
    for one in chosen:
        length, mine = max(longest, one.prompt + one.limit), held + one.blocks
        if adapters is not None and adapters.counts(one) and one.adapter not in adapters.used:
            brought.add(one.adapter)
        room = adapters is None or adapters.room_for(brought)
        more = len(brought - {-1}) * adapters.rules.blocks if adapters is not None else 0
        if not room or (count + 1) * limits.blocks_for(length) - mine + more > plan.cache.free:
            break
        count, longest, held = count + 1, length, mine
    for one in chosen[:count]:
        plan.cache.look(one)
        plan.admit(one, longest)


POLICY = Static()
