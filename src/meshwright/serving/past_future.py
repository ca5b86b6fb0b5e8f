"""Past-Future: a request is admitted where the cache holds what is to come (Gong et al., ASPLOS 2025, 2507.10150).

Of every request in the engine the past says how long its answer is likely to be: of the last answers that were longer
than what it has generated, the median (the paper draws one of them; the median replays). Requests then end in order of
what they have left, and the cache is fullest just before one of them ends: it holds what is there now of all that have
not ended, and as many new tokens of each as the one that ends has left. Admission is by the highest of these; blocks
are held as tokens are computed, as vLLM does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from meshwright.serving.batching import NextBatch
from meshwright.serving.cache import EngineLimits
from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.vllm_v1 import compute_running


class PastFuture(msgspec.Struct, frozen=True):
    """The policy, on vLLM V1's way of computing."""

    name: str = "past-future"
    title: str = "admission by the cache that is to come (Past-Future, LightLLM)"
    code: int = 0
    budget: int = 8192
    reserves: bool = False
    watermark: bool = False
    steady: bool = False

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Compute what those that run need, then admit as long as the peak to come fits."""
        left = compute_running(plan, limits)
        past = sorted(plan.history)
        while not plan.evicted and left > 0 and len(plan.running) < limits.max_batch:
            one = plan.next()
            if one is None:
                break
            new = min(one.need, left)
            crowded = plan.running and future_peak([*plan.running, one], past) > limits.holds(plan.cache.total)
            if crowded or not plan.fits(one, one.computed + new):
                break
            left -= plan.compute(plan.admit(one, one.computed + new), new)

    def keeps(self, finished: bool, others: bool) -> bool:
        """Whoever is answered leaves."""
        return not finished


def left_to_generate(one: EngineRequest, past: Sequence[int]) -> int:
    """Return the tokens that a request is likely to generate yet, from the lengths of past answers in order; the most
    it may where none was longer than what it has."""
    longer = bisect_right(past, one.generated)
    if longer == len(past):
        return max(one.limit - one.generated, 0)
    return min(past[(longer + len(past)) // 2], one.limit) - one.generated


def future_peak(requests: Sequence[EngineRequest], past: Sequence[int]) -> int:
    """Return the most tokens that the cache holds until all of the requests are answered, if no other comes."""
    held = sorted(
        ((left_to_generate(one, past), one.prompt + one.generated) for one in requests),
        key=lambda pair: -pair[0],
    )
    peak = there = 0
    for count, (left, tokens) in enumerate(held, 1):  # just before the count-th from the end ends, so many are there
        there += tokens
        peak = max(peak, there + count * left)
    return peak


POLICY = PastFuture()
