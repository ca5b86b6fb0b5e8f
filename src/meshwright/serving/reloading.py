"""New parameters in an engine that generates: what its cache holds was computed by the old ones.

AReaL's interruptible rollout workers (Fu et al. 2025, 2505.24298, section 4.1) stop what they generate, load the
parameters, compute the keys and values of all tokens so far again and go on with every answer where it stood.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.serving.batching import EngineState


def forget(state: EngineState) -> list[tuple[int, int]]:
    """Let everybody who runs wait again, before all others and in the same order, with nothing computed, and drop all
    that the cache kept of others; returns who ran, the last first, with the tokens that were computed of them."""
    gone = [one for one in reversed(state.running) if not one.done]
    state.running[:] = [one for one in state.running if one.done]
    found = []
    for one in gone:
        if one in state.cohort:
            state.cohort.leave(one)
        found.append((one.number, one.computed))
        one.running = False
        state.cache.drop(one)
        one.computed = 0
        state.waiting.back(one)
    for one in state.waiting:
        if one.swapped:
            state.cache.host_free += state.cache.limits.blocks_for(one.computed)
            one.swapped = False
        if not one.blocks:
            one.computed = 0
    state.cache.forget()
    return found
