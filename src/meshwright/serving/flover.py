"""Flover: a prompt is computed by itself and then fused into the generation loop that runs (Yao et al., HiPC 2023,
2305.13484).

Pre-processing is apart from generation: a request that comes is computed alone as soon as there is a buffer for its
longest answer, and from the next token on it is one of the batch; who is answered leaves at once, and the buffers of
the others are put in order, so that they stay one array. The buffers are reserved, as in FasterTransformer, on which it
is built; ``policy=static`` is that.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class Flover(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "flover"
    title: str = "each prompt alone, then fused into the running generation (Flover)"
    code: int = 0
    budget: int = 0
    reserves: bool = True
    watermark: bool = False

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute the next prompt for whose longest answer there is a buffer, else everybody's next token."""
        one = plan.next() if len(plan.running) < limits.max_batch else None
        if one is not None and plan.fits(one, one.prompt + one.limit):
            plan.compute(plan.admit(one, one.prompt + one.limit), one.need)
            return
        for one in plan.running[plan.decode_together(limits.max_batch) :]:
            plan.compute(one, one.need)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


POLICY = Flover()
