"""TensorRT-LLM: decoding and whole prompts in one iteration, and a cache that is reserved for the longest answer.

Its capacity scheduler lets a request run where the cache has room for its prompt and all of its answer beside what
those that run may come to, so that none is ever evicted (``GUARANTEED_NO_EVICT``, the default of
``capacity_scheduler_policy``); its micro-batch scheduler takes those that run first and then prompts in order of
arrival, as long as they fit into ``max_num_tokens`` whole: prompts are not cut unless ``enable_chunked_prefill`` says
so (tensorrt_llm/_torch/pyexecutor/scheduler, and cpp/tensorrt_llm/batch_manager/{capacity,microBatch}Scheduler.cpp).
"""

from __future__ import annotations

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits


class TensorRtLlm(msgspec.Struct, frozen=True):
    """The policy; 8,192 tokens are the engine's own ``max_num_tokens``, which it refuses longer prompts than: one alone
    is computed here all the same."""

    name: str = "trtllm"
    engine: str = "trtllm"
    title: str = "decode and whole prompts, cache of the longest answer reserved (TensorRT-LLM)"
    code: int = 6
    budget: int = 8192
    reserves: bool = True
    watermark: bool = False

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute everybody's next token, then admit those whose prompts fit whole and whose answers have room."""
        place = plan.decode_together(limits.budget)
        left = limits.budget - place
        for one in plan.running[place:]:
            new = plan.wanted(one)
            if new > left:
                break
            left -= plan.compute(one, new)
        while left > 0 and len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None or not plan.fits(one, one.prompt + one.limit):
                break
            if one.need > left and (plan.together or plan.shares):
                break
            left -= plan.compute(plan.admit(one, one.prompt + one.limit), one.need)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whether a sequence stays in the batch: until it is finished."""
        return not finished


POLICY = TensorRtLlm()
