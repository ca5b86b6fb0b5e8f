"""Bounds of serving plans: no simulation of any policy is better than they say, and each is reached by some request."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.answer.latency import objectives_kept, times_of
from meshwright.search.serving.bounds import ReplicaBounds, most_misses
from meshwright.serving.cache import CacheRules
from meshwright.simulate.serve import simulate
from meshwright.simulate.served import HostTimes
from meshwright.spec.requests import Requests
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica, requests

COSTS = linear_costs(base=0.010, token=1e-5, sampled=1e-4, decode=1e-7, prefill=2e-6)
#: The same where tokens take most of the time.
DEAR = linear_costs(base=0.010, token=1e-4, sampled=1e-4, decode=1e-7, prefill=2e-6)
HOST = HostTimes(step_s=1e-3, request_s=1e-5, eager_s=0.012, graph_tokens=32)
WORDS = "rate=1,prompt=1,output=1,ttft=100ms@p90,tpot=20ms@p90,e2e=2s@p80"


def drawn(seed, count=60, rate=20.0):
    """Requests at random times with random lengths, some of one token."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count))
    return Requests(arrival_s=at - at[0], prompt=rng.integers(1, 400, count), output=rng.integers(1, 60, count))


def asked(policy, *, stages=1, blocks=400, budget=0, costs=COSTS):
    return replica(policy, costs, max_batch=16, blocks=blocks, budget=budget, host=HOST, stages=stages)


@pytest.mark.parametrize("policy", serving.names("batching"))
@pytest.mark.parametrize("stages", [1, 3])
def test_no_policy_is_faster_than_the_bounds(policy, stages):
    serve = parse(WORDS)
    for seed, budget, blocks in ((0, 0, 400), (1, 64, 60), (2, 256, 40)):  # few blocks: requests are evicted
        one, many = asked(policy, stages=stages, blocks=blocks, budget=budget), drawn(seed)
        bounds = ReplicaBounds(one, many, serve)
        served = simulate(one, many)
        for floor, kept in zip(bounds.floors(), objectives_kept(serve, [many], [served])):
            assert floor.metric == kept.metric and floor.value_s <= kept.value_s * (1 + 1e-12), (floor, kept)
        busy = served.end_s.max() - served.spent_s[-1]  # without idling
        assert bounds.whole_s.sum() <= busy * (1 + 1e-12)


def test_floors_are_reached_by_a_request_alone():
    # an iteration of one token: 10 ms + 10 us, sampling 0.1 ms, the host 1 ms + 10 us; attention of 8 tokens, at least
    # of 1, at 0.1 us; a graph is replayed, so that no time of eager launches is added
    one, alone = asked("orca"), requests((0.0, 1, 2))
    tpot = ReplicaBounds(one, alone, parse("rate=1,prompt=1,output=1,tpot=20ms")).floors()[0].value_s
    assert tpot == pytest.approx(0.01001 + 1e-4 + 0.00101 + 1e-7)
    assert times_of(alone, simulate(one, alone)).tpot[0] == pytest.approx(tpot + 1e-7)  # its context is 2 tokens


def test_a_plan_of_fewer_replicas_than_the_bound_says_misses():
    serve = parse("rate=1,prompt=1,output=1,ttft=100ms@p90,tpot=25ms@p90")
    found = 0
    for seed in range(4):
        many = drawn(seed, 400).faster(12.0)
        bounds = ReplicaBounds(asked("vllm-v1", blocks=4000, costs=DEAR), many, serve)
        least = bounds.least_replicas()
        for replicas in range(1, least):
            shares = [many.chosen(np.arange(i, len(many), replicas)) for i in range(replicas)]
            served = [simulate(bounds.replica, share) for share in shares]
            assert not all(one.met for one in objectives_kept(serve, shares, served))
            found += 1
    assert found >= 4  # else nothing was shown


def test_no_rate_above_the_bound_is_kept():
    serve = parse("rate=1,prompt=1,output=1,ttft=100ms@p90,tpot=25ms@p90")
    many = drawn(7, 600)
    bounds = ReplicaBounds(asked("sarathi", blocks=4000), many, serve)
    most = bounds.most_speed(1)
    assert 0 < most < np.inf
    over = many.faster(most * 1.001)
    kept = objectives_kept(serve, [over], [simulate(bounds.replica, over)])
    assert not all(one.met for one in kept)


def test_prompts_that_may_be_cached_already_are_not_counted():
    many, serve = drawn(3), parse(WORDS)
    few = asked("vllm-v1", costs=linear_costs(base=0.010, token=1e-4))
    shared = msgspec.structs.replace(few, rules=CacheRules(prefix=True))
    whole, cached = (ReplicaBounds(one, many, serve) for one in (few, shared))
    assert cached.floors()[0].value_s < whole.floors()[0].value_s
    assert (cached.whole_s <= whole.whole_s).all() and not cached.attention_s.any()


def test_a_mechanism_that_saves_work_the_bounds_count_has_none():
    less = msgspec.structs.replace(asked("vllm-v1"), kv_read=0.5)
    bounds = ReplicaBounds(less, drawn(3), parse(WORDS))
    assert bounds.floors() == [] and bounds.least_replicas() == 1 and bounds.most_speed(1) == np.inf


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 2, 10, 101])
def test_a_percentile_is_kept_exactly_where_few_enough_miss(share, count):
    # numpy's percentile lies between two values; with as many misses as may be, the lower of them still keeps it
    most = most_misses(share, count)
    for misses in range(count + 1):
        low = np.sort(np.where(np.arange(count) < count - misses, 0.0, 2.0))[int(np.floor(share * (count - 1)))]
        assert (low <= 1.0) == (misses <= most)
