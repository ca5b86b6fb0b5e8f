"""Batching: the decider of what a serving engine computes in its next iteration, whatever the policy.

A request is a sequence of tokens: its prompt, then what was generated. Those whose keys and values are in the cache are
``computed``; an iteration computes some that are not, and where it computes the last of them a token is generated.
Decoding is computing one token a time, and prefill is computing many, so that one rule holds for both (vLLM V1's
scheduler has the idea). The policy alone decides who is computed; arrival, progress and the end are the same for all.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

#: Past answers whose lengths an engine remembers.
REMEMBERED = 1000


class EngineRequest(msgspec.Struct, frozen=True):
    """A request in the engine: tokens of its ``prompt``, the most it may generate (``limit``), tokens ``computed`` and
    ``generated``, and the cache blocks that it holds. ``done``: it is answered, and its place still taken."""

    number: int
    prompt: int
    limit: int
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    done: bool = False

    @property
    def need(self) -> int:
        """Tokens to be computed before the next one is generated."""
        return self.prompt + self.generated - self.computed

    def with_blocks(self, blocks: int) -> EngineRequest:
        """Return the sequence with so many cache blocks."""
        return msgspec.structs.replace(self, blocks=blocks)

    def emptied(self) -> EngineRequest:
        """Return the sequence without its cache: all of it is to be computed again."""
        return msgspec.structs.replace(self, computed=0, blocks=0)


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a serving engine: at most ``max_batch`` sequences at a time and ``budget`` tokens an iteration, and
    ``blocks`` cache blocks of ``block`` tokens."""

    max_batch: int
    budget: int
    block: int
    blocks: int

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-tokens // self.block)

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.blocks * self.block

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free where a policy keeps some for sequences that grow: 1% (vLLM V0)."""
        return self.blocks // 100


class Share(msgspec.Struct, frozen=True):
    """A sequence's part of an iteration: ``new`` tokens computed, behind ``past`` that were before; ``samples``: a
    token is generated."""

    number: int
    new: int
    past: int
    samples: bool


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Requests came: (number, tokens of the prompt, most tokens of the answer) of each."""

    requests: tuple[tuple[int, int, int], ...]


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The iteration is over, and these requests are answered."""

    finished: tuple[int, ...] = ()


class Iterate(msgspec.Struct, frozen=True, tag=True):
    """Compute an iteration."""

    shares: tuple[Share, ...]


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Drop the cache of a request, which is computed again later."""

    number: int


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine: who waits, who runs, both in order, free cache blocks, the iteration under way, and the
    lengths of the last answers."""

    waiting: tuple[EngineRequest, ...] = ()
    running: tuple[EngineRequest, ...] = ()
    free: int = 0
    shares: tuple[Share, ...] = ()
    history: tuple[int, ...] = ()


class NextBatch(msgspec.Struct):
    """An iteration being planned; a policy writes it. ``history`` are the lengths of the last answers."""

    waiting: list[EngineRequest]
    running: list[EngineRequest]
    free: int
    shares: list[Share]
    evicted: list[int]
    history: tuple[int, ...] = ()

    def compute(self, place: int, new: int) -> None:
        """Put so many tokens of the sequence at that place among those running into the iteration."""
        one = self.running[place]
        self.shares.append(Share(one.number, new, one.computed, new == one.need))

    def hold(self, place: int, blocks: int) -> None:
        """Give the sequence at that place cache blocks, until it has so many."""
        one = self.running[place]
        self.free -= blocks - one.blocks
        self.running[place] = one.with_blocks(blocks)

    def admit(self, blocks: int) -> int:
        """Let the first who waits run, with so many cache blocks; returns its place."""
        self.running.append(self.waiting.pop(0))
        self.hold(len(self.running) - 1, blocks)
        return len(self.running) - 1

    def evict_last(self) -> int:
        """Take the cache blocks of the sequence that was admitted last, which then waits as the first; returns its
        place."""
        last = self.running.pop()
        self.free += last.blocks
        self.waiting.insert(0, last.emptied())
        self.evicted.append(last.number)
        return len(self.running)


class BatchPolicy(Protocol):
    """A batching policy.

    ``code`` numbers those that the compiled simulator knows, 0 for all others. ``budget`` is its usual token budget, 0
    where it has none. ``reserves``: a request gets the blocks of its whole answer at once, and none is ever evicted.
    ``watermark``: admission leaves 1% of the blocks free.
    """

    name: str
    title: str
    code: int
    budget: int
    reserves: bool
    watermark: bool

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Write the next iteration into a plan: its shares, who is admitted, who is evicted."""

    def keeps(self, finished: bool, others: bool) -> bool:
        """Return whether a sequence stays in its place; `others`: some of its batch are not answered yet."""


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """The decider of one engine: a policy and its limits."""

    policy: BatchPolicy
    limits: EngineLimits

    def begin(self) -> Queues:
        """The state of an engine that nobody asked anything."""
        return Queues(free=self.limits.blocks)

    def decide(self, state: Queues, event: Arrived | Computed) -> tuple[Queues, tuple[Iterate | Evict, ...]]:
        """The state after an event, and the next iteration where the engine has none under way."""
        match event:
            case Arrived(requests=new):
                state = msgspec.structs.replace(state, waiting=(*state.waiting, *(EngineRequest(*one) for one in new)))
                return (state, ()) if state.shares else self._next(state)
            case Computed(finished=finished):
                return self._next(self._after(state, set(finished)))

    def _after(self, state: Queues, finished: set[int]) -> Queues:
        """The state behind an iteration: what it computed, and without those that leave."""
        new = {share.number: share.new for share in state.shares}
        moved = [_moved(one, new.get(one.number, 0), one.number in finished) for one in state.running]
        others = not all(one.done for one in moved)
        stay = [self.policy.keeps(one.done, others) for one in moved]
        freed = sum(one.blocks for one, kept in zip(moved, stay) if not kept)
        running = tuple(one for one, kept in zip(moved, stay) if kept)
        history = (*state.history, *(one.generated for one in moved if one.number in finished))[-REMEMBERED:]
        return msgspec.structs.replace(state, running=running, free=state.free + freed, shares=(), history=history)

    def _next(self, state: Queues) -> tuple[Queues, tuple[Iterate | Evict, ...]]:
        plan = NextBatch(list(state.waiting), list(state.running), state.free, [], [], state.history)
        self.policy.plan(plan, self.limits)
        state = Queues(
            waiting=tuple(plan.waiting),
            running=tuple(plan.running),
            free=plan.free,
            shares=tuple(plan.shares),
            history=state.history,
        )
        evicted = tuple(Evict(number) for number in plan.evicted)
        return state, (*evicted, *((Iterate(state.shares),) if state.shares else ()))


def _moved(one: EngineRequest, new: int, finished: bool) -> EngineRequest:
    samples = new > 0 and new == one.need
    return msgspec.structs.replace(
        one, computed=one.computed + new, generated=one.generated + samples, done=one.done or finished
    )
