"""Sarathi-Serve: chunks of prompts ride along with decoding, so that no answer stalls (Agrawal et al., OSDI 2024,
2403.02310, algorithm 3).

An iteration computes everybody's next token, then the chunk of a prompt that was begun, then of new ones, up to a
budget of tokens that keeps the iteration short. A prompt is admitted where there are cache blocks for all of it.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits
from meshwright.serving.vllm_v1 import compute_running


class Sarathi(msgspec.Struct, frozen=True):
    """The policy; 512 is the paper's budget for strict objectives (section 5.1)."""

    name: str = "sarathi"
    title: str = "chunked prefill beside decoding (Sarathi-Serve)"
    code: int = 5
    budget: int = 512
    reserves: bool = False
    watermark: bool = True

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute next tokens and begun prompts, then admit. Of those that run only the last has a prompt that is not
        computed yet, so that their order is the paper's."""
        left = compute_running(plan, limits)
        if plan.evicted:
            return
        while left > 0 and len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None or not plan.fits(one, one.target, limits.watermark):
                break
            new = min(one.need, left)
            left -= plan.compute(plan.admit(one, one.target), new)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


POLICY = Sarathi()
