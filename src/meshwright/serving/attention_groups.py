"""Attention groups of an engine whose prompts wait for one another: each has a scheduler of its own, all take the same
steps.

A request belongs to one group from when the engine takes it, which it does not while its batch is full, and its prompt
is computed there: in TensorRT-LLM that of the fewest tokens among those with less requests than the fullest group will
have (``_balance_requests_across_ranks``, tensorrt_llm/_torch/pyexecutor/executor_request_queue.py, which looks at the
longest of several that come at once first; here it is the one that came first). Where one group has a prompt all wait
for its iteration, so that prompts are held back until each group has one, or for so many iterations, those of a full
batch too (``_balance_adp_requests``, py_executor.py). Under a load that leaves one group at a time, that takes as long
as to draw all of them, about ``groups * (1 + 1/2 + ... + 1/groups)`` requests. An iteration has room for the tokens of
each group alone, its first prompt apart: the second long one waits for the next round.

All ranks take part in the exchanges of an iteration's experts, so that it takes as long as that of the group with most
tokens; where nobody computes a prompt all groups replay the CUDA graph of the largest batch among them, filled up with
tokens that nobody asked for (``maybe_get_cuda_graph`` and ``_get_padded_batch``, cuda_graph_runner.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import FOR_EVER

if TYPE_CHECKING:
    from meshwright.serving.batching import NextBatch
    from meshwright.serving.cache import EngineLimits
    from meshwright.serving.fcfs import WaitingQueue


class AttentionGroups:
    """The groups of one engine: who belongs to which is written down in the requests; of the iteration that is planned
    the tokens that each has ``room`` for yet (None: nobody asked), and those with a prompt (``given``); ``settled`` are
    the iterations that prompts waited while each had one."""

    def __init__(self, limits: EngineLimits):
        self.count, self.each = limits.groups, limits.budget // limits.groups if limits.budget else FOR_EVER
        self.room: list[int] | None = None
        self.given: set[int] = set()
        self.settle, self.settled, self.settling = limits.settle, 0, False

    def place(self, running: list[EngineRequest], waiting: WaitingQueue, *, full: bool) -> None:
        """Give every request that has no group one, in order of waiting; the engine takes none while its batch is
        full."""
        self.room = None
        self.given.clear()
        new = [] if full else [one for one in waiting if one.group < 0]
        if not new:
            return
        active, tokens = [0] * self.count, [0] * self.count
        for one in (*running, *waiting):
            if one.group >= 0:
                active[one.group] += 1
                tokens[one.group] += one.prompt
        most = max(-(-(sum(active) + len(new)) // self.count), *active)
        for one in new:
            one.group = min((tokens[g], g) for g in range(self.count) if active[g] < most)[1]
            active[one.group] += 1
            tokens[one.group] += one.prompt

    def wait(self, running: list[EngineRequest], waiting: WaitingQueue) -> bool:
        """Return whether prompts wait: somebody runs in every group, and some group has no prompt, or they are
        ``settling`` since each has one, so that more of them go together."""
        busy, asked = {one.group for one in running}, {one.group for one in waiting}
        self.settling = False
        if len(busy) < self.count:
            return False
        if len(asked) < self.count:
            return True
        self.settling = self.settled < self.settle
        self.settled = self.settled if self.settling else 0
        return self.settling

    def busiest(self, plan: NextBatch) -> tuple[int, int, int]:
        """Return the most tokens, next tokens and prompts that any group has in an iteration."""
        tokens, decoding, prompts = ([0] * self.count for _ in range(3))
        for one in plan.cohort.members.values() if plan.together else ():
            tokens[one.group] += 1
            decoding[one.group] += 1
        for share, one in zip(plan.shares, plan.sharing, strict=True):
            tokens[one.group] += share.new
            (decoding if share.new - share.drafted == 1 and share.past else prompts)[one.group] += 1
        return max(tokens), max(decoding), max(prompts)

    def first(self, plan: NextBatch, waiting: WaitingQueue) -> EngineRequest | None:
        """Return who is to run next: the first of those whose group has no prompt in the iteration yet, or room for
        theirs too, with nobody of the same group before them that it has none for."""
        if self.room is None:
            self.room = [self.each] * self.count
            for one in plan.cohort.members.values() if plan.together else ():
                self.room[one.group] -= 1
            for share, one in zip(plan.shares, plan.sharing, strict=True):
                self.room[one.group] -= share.new
        full: set[int] = set()
        for one in waiting:
            if one.group not in full and (one.group not in self.given or one.need <= self.room[one.group]):
                self.room[one.group] -= one.need
                self.given.add(one.group)
                return one
            full.add(one.group)
        return None
