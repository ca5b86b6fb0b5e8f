"""vLLM V0: prompts first, in iterations of their own, and a paged cache that grows with the answers.

Kwon et al., SOSP 2023, 2309.06180, section 4.5: requests are served in order of arrival; where the cache is full the
one admitted last loses its blocks and is computed again later (preemption by recompute). While prompts are computed
nobody else's answer goes on.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import EngineLimits, NextBatch


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
        while plan.waiting and len(plan.running) < limits.max_batch:
            new = plan.waiting[0].need
            blocks = limits.blocks_for(new)
            alone = not plan.shares
            if (new > left and not alone) or plan.free - blocks < limits.watermark:
                break
            plan.compute(plan.admit(blocks), new)
            left -= new
            if left <= 0:
                break
        if plan.shares:
            return
        place = 0
        while place < len(plan.running):
            if make_room(plan, limits, place, 1):
                plan.compute(place, 1)
            place += 1

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


def make_room(plan: NextBatch, limits: EngineLimits, place: int, new: int) -> bool:
    """Hold the blocks that so many more tokens of a sequence need, evicting from the end; whether it is still there."""
    blocks = limits.blocks_for(plan.running[place].computed + new)
    while blocks - plan.running[place].blocks > plan.free:
        if plan.evict_last() == place:
            return False
    plan.hold(place, max(blocks, plan.running[place].blocks))
    return True


POLICY = VllmV0()
