"""vLLM V1: decoding and prefill in one iteration, under one budget of tokens.

Those that run come first, in order of admission; what is left of the budget goes to those that wait, whose prompts are
cut into chunks where they do not fit (vllm/v1/core/sched/scheduler.py). Blocks are held as tokens are computed; where
there are none the request admitted last is evicted and computed again, and then nobody is admitted in that iteration.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class VllmV1(msgspec.Struct, frozen=True):
    """The policy; its usual budget is that of the server on a large device.

    Blocks of a prompt have their names from when they are scheduled (kv_cache_manager.py, allocate_slots), so that
    prompts of one iteration that begin alike are computed once."""

    name: str = "vllm-v1"
    title: str = "decode and prefill under one token budget (vLLM V1)"
    code: int = 4
    budget: int = 8192
    reserves: bool = False
    watermark: bool = False
    ahead: bool = True

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute what those that run need, then admit."""
        left = compute_running(plan, limits)
        if plan.evicted:
            return
        while left > 0 and len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None:
                break
            new = min(one.need, left)
            if not plan.fits(one, one.computed + new):
                break
            left -= plan.compute(plan.admit(one, one.computed + new), new)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


def compute_running(plan: NextBatch, limits: EngineLimits) -> int:
    """Compute what those that run need, in order of admission, evicting from the end where blocks run out; returns what
    is left of the budget."""
    place = plan.decode_together(limits.budget)
    left = limits.budget - place
    while place < len(plan.running) and left > 0:
        one = plan.running[place]
        new = min(plan.wanted(one), left)
        if plan.make_room(one, new):
            left -= plan.compute(one, new)
        place += 1
    return left


POLICY = VllmV1()
