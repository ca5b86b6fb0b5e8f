"""Pulling: how an engine that goes on with prompts computed elsewhere asks for their keys and values.

It asks when it has room, so that a burst of prompts waits in the memory of those who computed it (DistServe, Zhong et
al., OSDI 2024, 2401.09670, section 4.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest, NewRequest

if TYPE_CHECKING:
    from meshwright.serving.batching import BatchPolicy, EngineState


class Offered(msgspec.Struct, frozen=True, tag=True):
    """Another engine computed the prompts of these requests, or is about to, and keeps their keys and values until they
    are pulled. An iteration under way is meant to be the `times`-th of equal ones."""

    requests: tuple[NewRequest, ...]
    times: int = 1


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Fetch the keys and values of a request from the engine that offered it: there are blocks for them from now on. It
    has :class:`Arrived` when they are here."""

    number: int


def pulls(state: EngineState, policy: BatchPolicy, times: int = 1) -> tuple[Pull, ...]:
    """Hold blocks for those of the offered requests, in order, that find room and a place in the batch; returns them.
    The iteration under way is meant to be the `times`-th of equal ones."""
    if not state.offered:
        return ()
    cache, limits, found = state.cache, state.cache.limits, []
    spare = limits.watermark if policy.watermark else 0
    if times > 1 and not policy.reserves:  # blocks taken since the first of the iterations under way
        spare += sum(limits.blocks_for(s.past + times) - limits.blocks_for(s.past + 1) for s in state.shares)
        spare += state.cohort.growth(times - 1)
    while state.offered:
        new = state.offered[0]
        places = len(state.running) + len(state.waiting) + len(state.coming)
        tokens = new.prompt + new.limit if policy.reserves else new.computed + 1
        one = EngineRequest(new, state.came)
        room = cache.allows(one) and cache.needs(one, tokens) + spare <= cache.free
        if places >= limits.max_batch or not room:
            break
        state.offered.popleft()
        state.came += 1
        cache.hold(one, tokens)
        state.coming[new.number] = one
        found.append(Pull(new.number))
    return tuple(found)


def gives_up(state: EngineState) -> EngineRequest | None:
    """Take the blocks of whoever came last of those who wait with some, as nobody else can run: its keys and values
    came from elsewhere, and are computed again. Returns it; None where there is none."""
    last = max((one for one in state.waiting if one.blocks), key=lambda one: one.order, default=None)
    if last is not None:
        state.cache.evict(last)
    return last
