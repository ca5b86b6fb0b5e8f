"""Prefill and decode apart in the compiled loop: equal, to the last bit, to the events of all replicas together."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.simulate import apart_loop as loop
from meshwright.simulate.kv_links import KvPath
from meshwright.simulate.serve_apart import ApartReplicas, served_apart
from meshwright.simulate.serve_split import served_fast, served_split
from meshwright.simulate.served import HostTimes, ServedRequests
from meshwright.spec.requests import Requests
from tests.serving.costs import linear_costs, replica

COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 14)
SLOW = linear_costs(base=7e-3, token=3e-5, sampled=1e-5, decode=5e-7, prefill=2e-5, tokens=1 << 13)
ROUND_ROBIN = serving.get("routing", "round-robin")


def drawn(seed, count=120, gap_s=0.02, concurrency=0):
    """Requests at random times, or all at once in a closed loop."""
    random = np.random.default_rng(seed)
    at = np.zeros(count) if concurrency else np.cumsum(random.exponential(gap_s, count))
    prompt, output = random.integers(1, 900, count), random.integers(1, 40, count)
    return Requests(arrival_s=at, prompt=prompt, output=output, concurrency=concurrency)


def replicas(policy, prefills, decodes, token_s=4e-6, blocks=4000, max_batch=64, both=1, stages=1, host=None, **gate):
    """Replicas that compute prompts, those that go on with them, and some that do both."""
    kind = {"blocks": blocks, "max_batch": max_batch, "budget": 512, "host": host}
    one = replica(policy, COSTS, **kind, stages=stages)
    other = replica(policy, SLOW, **(kind | {"blocks": blocks + 7}))
    one, other = (msgspec.structs.replace(r, limits=msgspec.structs.replace(r.limits, **gate)) for r in (one, other))
    behind = tuple(range(prefills, prefills + decodes))
    path = KvPath(lambda tokens: (1e-4, token_s * tokens), 1.0, 0.6, "port", 4)
    return ApartReplicas(
        replicas=(one,) * prefills + (other,) * decodes + (one,) * both,
        targets=(behind,) * prefills + ((),) * (decodes + both),
        paths={(i, j): path for i in range(prefills) for j in behind},
    )


def equal(mine, other):
    """Assert that two records are the same in all they say."""
    for name in type(mine).__struct_fields__:
        left, right = getattr(mine, name), getattr(other, name)
        if isinstance(left, tuple):
            assert len(left) == len(right)
            for one, two in zip(left, right):
                equal(one, two)
        elif isinstance(left, ServedRequests):
            equal(left, right)
        else:
            assert np.array_equal(left, right), name


def both_ways(apart, requests):
    """The records of the events one by one, after asserting that the loop's are the same."""
    together = served_apart(apart, requests, ROUND_ROBIN)
    equal(served_fast(apart, requests, ROUND_ROBIN), together)
    return together


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v1", "sarathi"])
@pytest.mark.parametrize(("prefills", "decodes", "token_s"), [(1, 1, 1e-6), (2, 3, 2e-5), (3, 1, 1e-4)])
@pytest.mark.parametrize("concurrency", [0, 9])
def test_the_loop_is_the_events_of_all_replicas(policy, prefills, decodes, token_s, concurrency):
    apart = replicas(policy, prefills, decodes, token_s)
    found = both_ways(apart, drawn(prefills, concurrency=concurrency))
    assert (found.whole.end_s > 0).all() and found.link_s > 0


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v1", "sarathi"])
@pytest.mark.parametrize("short", [{"blocks": 120}, {"max_batch": 3}, {"blocks": 90, "max_batch": 5}])
@pytest.mark.parametrize("concurrency", [0, 40])
def test_it_is_where_caches_wait_for_room_and_are_computed_again(policy, short, concurrency):
    apart = replicas(policy, 2, 1, both=0, **short)
    found = both_ways(apart, drawn(3, gap_s=0.004, concurrency=concurrency))
    assert (found.whole.end_s > 0).all()
    assert "blocks" not in short or policy == "vllm-v0" or found.whole.evictions


def test_it_is_with_pipelines_and_hosts_that_are_slow():
    host = HostTimes(step_s=1e-3, request_s=1e-5, eager_s=9e-3, graph_tokens=24, front_s=1.0)
    both_ways(replicas("vllm-v1", 1, 2, stages=3, host=host), drawn(5, concurrency=30))


@pytest.mark.parametrize("concurrency", [0, 30])
def test_it_is_where_requests_wait_for_one_another_at_the_front_of_every_door(concurrency):
    host = HostTimes(step_s=1e-3, serial_s=0.02, serial_token_s=1e-5)
    found = both_ways(replicas("vllm-v1", 2, 1, host=host), drawn(5, concurrency=concurrency))
    whole = found.whole
    assert (whole.scheduled_s >= whole.arrival_s + 0.02).all()
    assert (np.diff(np.sort(whole.scheduled_s[found.source == 0])) >= 0).all()


@pytest.mark.parametrize("gate", [{"poll": 7}, {"batch_wait": 5, "fill": 0.5}, {"poll": 4, "batch_wait": 3}])
def test_it_is_behind_gates(gate):
    for concurrency in (0, 17):
        both_ways(replicas("vllm-v1", 2, 2, **gate), drawn(7, concurrency=concurrency))


def test_it_keeps_the_samples_that_are_kept_of_many():
    requests = msgspec.structs.replace(drawn(2, 2500, concurrency=3), prompt=np.full(2500, 40))
    found = both_ways(replicas("vllm-v1", 1, 1, both=0), requests)
    assert found.each[1].runs > 4096 >= 2 * len(found.each[1].sample_s)


def test_plain_and_compiled_are_equal(monkeypatch):
    apart, requests = replicas("sarathi", 2, 1, blocks=150), drawn(4, 60, concurrency=20)
    found = []
    for way in (loop.apart_loop.plain, loop.apart_loop.compiled):
        monkeypatch.setattr("meshwright.simulate.serve_split.apart_loop", way)
        found.append(served_fast(apart, requests, ROUND_ROBIN))
    equal(*found)


def test_where_somebody_looks_at_replicas_or_layers_are_sent_the_events_are_simulated():
    apart, requests = replicas("vllm-v1", 1, 2), drawn(0, 40)
    looks = serving.get("routing", "least-loaded")
    layers = msgspec.structs.replace(apart, layerwise=True)
    for some, router in ((apart, looks), (layers, ROUND_ROBIN)):
        equal(served_split(some, requests, router), served_apart(some, requests, router))


def test_where_prompts_wait_for_those_of_other_attention_groups_the_events_are_simulated():
    apart, asked = replicas("vllm-v1", 2, 2, batch_wait=9, groups=4), drawn(7, concurrency=17)
    equal(served_split(apart, asked, ROUND_ROBIN), served_apart(apart, asked, ROUND_ROBIN))


def test_where_tokens_leave_in_a_line_the_events_of_all_replicas_are_computed():
    # one after the other as the loop of engines side by side does not know: 2 ms a token, whatever engine made it
    apart = replicas("vllm-v1", 1, 1, both=0, host=HostTimes(step_s=1e-3, stream_s=2e-3))
    asked = drawn(3, 40, concurrency=10)
    equal(served_split(apart, asked, ROUND_ROBIN), served_apart(apart, asked, ROUND_ROBIN))
    at_once = served_split(replicas("vllm-v1", 1, 1, both=0, host=HostTimes(step_s=1e-3)), asked, ROUND_ROBIN)
    last = [float(run.whole.end_s.max()) for run in (served_split(apart, asked, ROUND_ROBIN), at_once)]
    assert last[0] > last[1] and last[0] > 2e-3 * int(asked.output.sum() - len(asked))
