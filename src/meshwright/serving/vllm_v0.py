"""vLLM V0: prompts first, in iterations of their own, and a paged cache that grows with the answers.

Kwon et al., SOSP 2023, 2309.06180, section 4.5: requests are served in order of arrival; where the cache is full the
one admitted last loses its blocks and is computed again later (preemption by recompute). While prompts are computed
nobody else's answer goes on.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class VllmV0(msgspec.Struct, frozen=True):
    """The policy. A prompt longer than the budget is computed alone, as the engine's budget is never below the longest
    sequence it takes."""

    name: str = "vllm-v0"
    title: str = "prompts first, paged cache, preemption by recompute (vLLM V0)"
    code: int = 3
    budget: int = 8192
    reserves: bool = False
    watermark: bool = True

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute the prompts for which there is room, else everybody's next token."""
        left = limits.budget
        while len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None:
                break
            new = one.need
            if (new > left and plan.shares) or not plan.fits(one, one.computed + new, limits.watermark):
                break
            left -= plan.compute(plan.admit(one, one.computed + new), new)
            if left <= 0:
                break
        if plan.shares:
            return
        place = plan.decode_together(limits.max_batch)
        while place < len(plan.running):
            one = plan.running[place]
            new = plan.wanted(one)
            if plan.make_room(one, new):
                plan.compute(one, new)
            place += 1

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


POLICY = VllmV0()
