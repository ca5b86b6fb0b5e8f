"""The gate of an engine: when it looks for new requests, and when prompts that wait are let into an iteration.

An engine that talks to its clients' processes after every iteration loses time by it, so that SGLang looks for new
requests once in so many iterations of decoding (``--scheduler-recv-interval``; after an iteration with a prompt it
looks at once: sglang/srt/managers/scheduler_recv_skipper.py). An iteration with a prompt is long for everybody who
decodes, whatever else is in it, so that TensorRT-LLM lets prompts wait until there are enough of them: those that
fill a share of the budget (``batch_wait_timeout_iters``, ``batch_wait_max_tokens_ratio``), or one in each attention
group, which otherwise wait for the one that has a prompt (``attention_dp_config``;
tensorrt_llm/_torch/pyexecutor/scheduler; :mod:`meshwright.serving.attention_groups`); once each has one, a time more,
for which others come meanwhile (``batching_wait_iters``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.serving.attention_groups import AttentionGroups
from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import FOR_EVER

if TYPE_CHECKING:
    from meshwright.serving.batching import EngineState, NextBatch
    from meshwright.serving.cache import EngineLimits, KvCache
    from meshwright.serving.fcfs import WaitingQueue


class AdmissionGate:
    """The gate of one engine. ``unseen`` came since it last looked; ``closed``: nobody who waits is let in now;
    ``since`` are the iterations since it looked, ``held`` those since prompts were last let in, or began to wait; a
    full batch keeps them waiting as well."""

    def __init__(self, limits: EngineLimits):
        self.limits = limits
        self.unseen: list[EngineRequest] = []
        self.closed = False
        self.since = self.held = 0
        self.groups = AttentionGroups(limits) if limits.apart else None

    def came(self, one: EngineRequest, state: EngineState) -> None:
        """Note a new request, which waits from when the engine looks."""
        if self.limits.poll > 1:
            self.unseen.append(one)
        else:
            state.waiting.add(one)

    def look(self, state: EngineState) -> None:
        """Look for new requests if it is time to, and decide whether prompts are let in."""
        if self.unseen and (self.since == 0 or not state.running):
            for one in self.unseen:
                state.waiting.add(one)
            self.unseen.clear()
        if self.groups is not None:
            self.groups.place(state.running, state.waiting, full=len(state.running) >= self.limits.max_batch)
        if self.limits.batch_wait:
            self.closed = self._closed(state)

    def first(self, plan: NextBatch, waiting: WaitingQueue, cache: KvCache) -> EngineRequest | None:
        """Return who waits and is to run next, in the iteration that is planned; None where nobody is let in."""
        if self.closed:
            return None
        return waiting.first(cache) if self.groups is None else self.groups.first(plan, waiting)

    def busiest(self, plan: NextBatch) -> tuple[int, int, int] | None:
        """Return the most tokens, next tokens and prompts of any attention group, where it matters who has them."""
        return None if self.groups is None else self.groups.busiest(plan)

    def _closed(self, state: EngineState) -> bool:
        limits, running, waiting = self.limits, len(state.running), len(state.waiting)
        closed = False
        if self.groups is not None:
            self.groups.settling = False
        if waiting and self.held < limits.batch_wait and limits.groups <= running < limits.max_batch:
            if self.groups is not None:
                closed = self.groups.wait(state.running, state.waiting)
            else:
                there = running + sum(one.target - one.computed for one in state.waiting)
                closed = min(there, limits.budget) < limits.enough
        asked = waiting and running < limits.max_batch
        if self.settling or (not closed and (asked or self.held >= limits.batch_wait or running < limits.groups)):
            self.held = 0
        return closed

    def passed(self, times: int, prompts: bool) -> None:
        """Note that so many iterations passed, and whether they computed a part of a prompt."""
        if self.limits.poll > 1:
            self.since = 0 if prompts else (self.since + times) % self.limits.poll
        if self.limits.batch_wait and (self.closed or self.limits.groups > 1):
            self.held = 1 if self.settling else self.held + times
        if self.settling:
            self.groups.settled += times

    @property
    def settling(self) -> bool:
        """Whether prompts wait although every attention group has one."""
        return self.groups is not None and self.groups.settling

    def room(self, state: EngineState) -> int:
        """Return the iterations after which it looks again, may let prompts in that wait, or closes."""
        limits = self.limits
        found = limits.poll - self.since if limits.poll > 1 else FOR_EVER
        if limits.batch_wait and (self.closed or limits.groups > 1):
            found = min(found, max(limits.batch_wait - self.held, 1))
        if self.settling:
            found = min(found, limits.settle - self.groups.settled)
        if limits.batch_wait and not self.closed and len(state.waiting) and len(state.running) < limits.max_batch:
            found = 1  # there is no room for who was let in
        return found
