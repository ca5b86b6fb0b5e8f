"""Prefixes kept of so many last requests: what llama.cpp keeps in its slots."""

import pytest

from meshwright.serving.batching import Admit, Arrived, Batching, Computed
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.orca import POLICY


@pytest.mark.parametrize(("slots", "found"), [(0, [0, 32, 0, 32, 32]), (1, [0, 32, 0, 0, 0]), (2, [0, 32, 0, 32, 32])])
def test_a_prefix_is_kept_of_so_many_last_requests(slots, found):
    # one after the other: two that begin alike, another, and both again; 3 blocks of 16 each, the last of it computed
    decider = Batching(
        policy=POLICY,
        limits=EngineLimits(max_batch=1, budget=0, block=16, blocks=1000),
        rules=CacheRules(prefix=True, unit=16, slots=slots),
    )
    state, cached = decider.begin(), []
    for number, group in enumerate((0, 0, 1, 0, 1)):
        hashes = tuple(range(10 * group, 10 * group + 3))
        state, decisions = decider.decide(state, Arrived((NewRequest(number, 48, 1, 0, 0, -1, -1, hashes=hashes),)))
        cached += [one.cached for one in decisions if isinstance(one, Admit)]
        state, _ = decider.decide(state, Computed((number,)))
    assert cached == found
    kept = {0: 6, 1: 3, 2: 6}[slots]
    assert len(state.cache.refs) == kept and state.free == 1000 and state.cache.bare == 1000 - kept
