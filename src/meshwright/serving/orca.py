"""Orca: scheduling by iteration (Yu et al., OSDI 2022, section 3.1).

A request leaves when it is answered and the next one joins at once; prompts are computed in the same iteration as
others' next tokens (selective batching). Admission reserves the cache of a request's longest answer, so that none is
ever evicted; where the longest answer is the real one this is vLLM's baseline "Orca (Oracle)" (2309.06180, section
6.1).
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class Orca(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "orca"
    title: str = "by iteration, cache of the longest answer reserved (Orca)"
    code: int = 2
    budget: int = 0
    reserves: bool = True
    watermark: bool = False

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Admit while there is room for the longest answer, and compute what everybody needs."""
        while len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None or not plan.fits(one, one.prompt + one.limit):
                break
            plan.admit(one, one.prompt + one.limit)
        for one in plan.running[plan.decode_together(limits.max_batch) :]:
            plan.compute(one, one.need)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


POLICY = Orca()
