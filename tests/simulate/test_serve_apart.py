"""Prefill and decode apart: hand calculations, every skipped run against its iterations, and what is equal to one
replica."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.cache import CacheRules
from meshwright.simulate.kv_links import KvFlow, KvLinks, KvPath
from meshwright.simulate.serve_apart import ApartReplicas, served_apart
from meshwright.simulate.serve_pool import served_alone
from meshwright.simulate.served import GAP_EDGES
from tests.serving.costs import linear_costs, replica, requests

COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 17)
ROUND_ROBIN = serving.get("routing", "round-robin")
TIMES = ("arrival_s", "scheduled_s", "first_s", "end_s")


def way(latency=0.0, token=0.0, out=1.0, into=1.0, layers=4):
    return KvPath(lambda tokens: (latency, token * tokens), out, into, "port", layers)


def two(prefill, decode, path, **more):
    return ApartReplicas(replicas=(prefill, decode), targets=((1,), ()), paths={(0, 1): path}, **more)


def test_two_requests_by_hand():
    # 10 ms an iteration, 1 ms a token, 0.1 ms a token of context. Both prompts of 20 together: 10 + 40 = 50 ms. Each
    # cache is 1 ms of latency and 10 ms of a port, which the two share: 21 ms later both are there. Four more tokens
    # each, behind 21 to 24 tokens: 4 * (10 + 2) + 2 * 0.1 * 90 = 66 ms
    one = replica("vllm-v1", linear_costs(base=0.010, token=0.001, decode=0.0001))
    found = served_apart(two(one, one, way(0.001, 0.0005)), requests((0.0, 20, 5), (0.0, 20, 5)), ROUND_ROBIN)
    assert found.whole.first_s.tolist() == pytest.approx([0.050, 0.050])
    assert found.pulled_s.tolist() == pytest.approx([0.050, 0.050])
    assert found.joined_s.tolist() == pytest.approx([0.071, 0.071])
    assert found.whole.end_s.tolist() == pytest.approx([0.137, 0.137])
    assert found.link_s == pytest.approx(0.020)  # each 10 ms of a port
    # the gap before the second token holds the transfer: 21 + 10 + 2 + 4.2 ms; the others are 12 + 4.4, 4.6, 4.8
    gaps = found.whole.gaps
    assert gaps.sum() == 8 and np.flatnonzero(gaps).max() == np.searchsorted(GAP_EDGES, 0.0372, side="right") - 1


@pytest.mark.parametrize(
    ("latency", "seconds", "there"),
    [
        (0.002, 0.008, 0.050 + 0.002 + 0.002),  # four layers of 2 ms each: all but the last went before
        (0.002, 0.400, 0.0125 + 0.002 + 0.400),  # the first is ready after a quarter of 50 ms, and the rest queues
    ],
)
def test_layers_are_sent_while_later_ones_are_computed(latency, seconds, there):
    one = replica("vllm-v1", linear_costs(base=0.010, token=0.001))
    apart = two(one, one, way(latency, seconds / 40), layerwise=True)
    found = served_apart(apart, requests((0.0, 40, 5)), ROUND_ROBIN)
    assert found.whole.first_s[0] == pytest.approx(0.050) and found.joined_s[0] == pytest.approx(there)


def test_a_cache_stays_where_its_prompt_was_computed_until_there_is_room():
    # iterations of a second. Three blocks of 16 tokens: the first request takes two for its 17 to 20 tokens, so that
    # the second is pulled when the first is answered, at 1 + 3 s, and the prefill side keeps its block until then
    one = replica("vllm-v1", linear_costs(base=1.0))
    decode = replica("vllm-v1", linear_costs(base=1.0), blocks=3)
    found = served_apart(two(one, decode, way()), requests((0.0, 16, 4), (0.0, 16, 4)), ROUND_ROBIN)
    assert found.pulled_s.tolist() == [1.0, 4.0] and found.whole.end_s.tolist() == [4.0, 7.0]
    later = served_apart(
        two(replica("vllm-v1", linear_costs(base=1.0), blocks=2), decode, way()),
        requests((0.0, 16, 4), (0.0, 16, 4), (0.0, 16, 1)),
        ROUND_ROBIN,
    )
    assert later.whole.scheduled_s.tolist() == [0.0, 0.0, 1.0]  # the first gave its block back at 1 s, at once
    assert later.whole.end_s[2] == 2.0 and later.target[2] == later.source[2] == 0  # one token goes nowhere


def test_a_full_batch_pulls_nothing():
    decode = replica("vllm-v1", max_batch=1)
    found = served_apart(two(replica("vllm-v1"), decode, way()), requests((0.0, 8, 3), (0.0, 8, 3)), ROUND_ROBIN)
    assert found.pulled_s.tolist() == [1.0, 3.0] and found.whole.end_s.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("policy", serving.names("batching"))
@pytest.mark.parametrize(("blocks", "layerwise"), [(120, False), (120, True), (2000, False)])
def test_runs_of_equal_iterations_change_nothing(policy, blocks, layerwise):
    rng = np.random.default_rng(blocks)
    rows = zip(np.cumsum(rng.exponential(1 / 30, 60)), rng.integers(1, 1500, 60), rng.integers(1, 120, 60))
    one = replica(policy, COSTS, blocks=blocks, budget=700)
    apart = ApartReplicas(
        replicas=(one,) * 5,
        targets=((2, 3), (3,), (), (), ()),  # two compute prompts, two go on with them, one does both
        paths={(0, 2): way(1e-3, 1e-5, 1.0, 0.5), (0, 3): way(1e-3, 2e-5), (1, 3): way(1e-3, 2e-5, 0.25)},
        layerwise=layerwise,
    )
    asked, router = requests(*rows), serving.get("routing", "least-loaded")
    skipped, plain = (served_apart(apart, asked, router, skips=skips) for skips in (True, False))
    for name in TIMES:
        assert getattr(skipped.whole, name) == pytest.approx(getattr(plain.whole, name), rel=1e-9), name
    assert skipped.joined_s == pytest.approx(plain.joined_s, rel=1e-9) and (skipped.whole.end_s > 0).all()
    assert skipped.target.tolist() == plain.target.tolist() and set(skipped.source) == {0, 1, 4}
    assert skipped.whole.evicted.tolist() == plain.whole.evicted.tolist()
    assert skipped.whole.iterations == plain.whole.iterations
    assert [s.peak_blocks for s in skipped.each] == [s.peak_blocks for s in plain.each]
    assert skipped.whole.spent_s == pytest.approx(plain.whole.spent_s, rel=1e-9)


@pytest.mark.parametrize("policy", serving.names("batching"))
def test_requests_one_after_the_other_over_instant_links_are_served_as_by_one_replica(policy):
    # whoever is alone meets no other's prompt: both halves do what one replica does
    one = replica(policy, COSTS)
    asked = requests((0.0, 300, 40), (5.0, 900, 1), (10.0, 20, 80))
    found, alone = served_apart(two(one, one, way()), asked, ROUND_ROBIN), served_alone(one, asked)
    for name in TIMES:
        assert getattr(found.whole, name) == pytest.approx(getattr(alone, name), rel=1e-12), name
    assert found.whole.gaps.tolist() == alone.gaps.tolist()


def test_first_tokens_are_those_of_a_replica_that_is_asked_for_no_other():
    rng = np.random.default_rng(5)
    rows = [*zip(np.cumsum(rng.exponential(0.03, 80)), rng.integers(1, 1500, 80), rng.integers(2, 120, 80))]
    one = replica("vllm-v1", COSTS)
    found = served_apart(two(one, one, way(1e-3, 1e-5)), requests(*rows), ROUND_ROBIN)
    alone = served_alone(one, requests(*((at, prompt, 1) for at, prompt, _ in rows)))
    assert found.whole.first_s == pytest.approx(alone.first_s, rel=1e-12)


def test_a_closed_loop_counts_whole_answers():
    # iterations of a second, two open: a first token at 1 s, the answers of three tokens at 3 s, then the next two
    one = replica("vllm-v1")
    found = served_apart(two(one, one, way()), requests(*[(0.0, 8, 3)] * 4, concurrency=2), ROUND_ROBIN)
    assert found.whole.arrival_s.tolist() == [0.0, 0.0, 3.0, 3.0] and found.whole.end_s.tolist() == [3.0, 3.0, 6.0, 6.0]


def test_whoever_is_evicted_gets_its_blocks_back_from_caches_that_wait():
    # the decode half holds four blocks: two requests grow until one is evicted, which is computed again where the
    # others of its kind came with theirs; all are answered
    one = replica("vllm-v0", linear_costs(base=1.0))
    decode = replica("vllm-v0", linear_costs(base=1.0), blocks=4, max_batch=3)
    found = served_apart(two(one, decode, way()), requests(*[(0.0, 16, 40)] * 5), ROUND_ROBIN)
    assert (found.whole.end_s > 0).all() and found.whole.evictions > 0


def flow(number, ends, path, ready, seconds):
    return KvFlow(number, *ends, path, ready, seconds)


def run(links):
    over = {}
    while links.flows:
        at = links.next_s
        over |= {one.number: at for one in links.advance(at)}
    return over


def test_transfers_share_the_ports_at_which_they_meet():
    # two of 10 s to one receiver, which is full; a third of 5 s from the sender of the first, whose port is half free:
    # it goes at half speed beside it until both are over
    links = KvLinks()
    links.add(flow(0, (0, 2), way(), 0.0, 10.0))
    links.add(flow(1, (1, 2), way(), 0.0, 10.0))
    links.add(flow(2, (0, 3), way(), 0.0, 5.0))
    assert run(links) == pytest.approx({2: 10.0, 0: 20.0, 1: 20.0}) and links.busy == pytest.approx(25.0)


def test_of_unequal_ends_the_wider_has_room_for_others():
    # a replica of four ranks sends to two of one: each transfer takes a quarter of its ports, so that neither waits
    links = KvLinks()
    links.add(flow(0, (0, 1), way(out=0.25), 0.0, 4.0))
    links.add(flow(1, (0, 2), way(out=0.25), 1.0, 4.0))
    assert run(links) == pytest.approx({0: 4.0, 1: 5.0})


def test_prompts_that_come_with_their_cache_share_its_prefix_afterwards():
    # 32 tokens that both begin with, in named blocks: the second is computed behind the first's on the prefill side
    one = msgspec.structs.replace(replica("vllm-v1", COSTS), rules=CacheRules(prefix=True, unit=16))
    asked = requests((0.0, 40, 4), (3.0, 40, 4))
    asked = msgspec.structs.replace(asked, hashes=np.array([1, 2, 3, 1, 2, 4]), hash_ptr=np.array([0, 3, 6]))
    found = served_apart(two(one, one, way()), asked, ROUND_ROBIN)
    assert found.whole.cached.tolist() == [0, 32] and (found.whole.end_s > 0).all()


def test_adapters_are_held_on_both_sides_while_requests_are_there():
    # an adapter takes 40 of 200 blocks: both halves bring those they need, and runs that are skipped change nothing
    rng = np.random.default_rng(3)
    rows = zip(np.cumsum(rng.exponential(1 / 30, 40)), rng.integers(1, 600, 40), rng.integers(2, 120, 40))
    asked = msgspec.structs.replace(requests(*rows), adapter=rng.integers(-1, 5, 40))
    rules = CacheRules(adapters=AdapterRules(blocks=40))
    one = msgspec.structs.replace(replica("vllm-v1", COSTS, blocks=200, budget=700), rules=rules)
    skipped, plain = (served_apart(two(one, one, way()), asked, ROUND_ROBIN, skips=skips) for skips in (True, False))
    for name in TIMES:
        assert getattr(skipped.whole, name) == pytest.approx(getattr(plain.whole, name), rel=1e-9), name
    assert (skipped.whole.end_s > 0).all() and skipped.whole.runs < skipped.whole.iterations


def test_a_static_batch_counts_the_adapters_that_it_brings():
    # 20 blocks an adapter and one of 16 tokens a request: of 62 blocks three requests with adapters of their own take
    # 20 + 1 each, and a batch of 62 has room for two
    one = msgspec.structs.replace(replica("static", blocks=62), rules=CacheRules(adapters=AdapterRules(blocks=20)))
    asked = msgspec.structs.replace(requests(*[(0.0, 8, 2)] * 3), adapter=np.arange(3))
    served = served_alone(one, asked)
    assert served.scheduled_s.tolist() == [0.0, 0.0, 2.0]
    rng = np.random.default_rng(482)
    many = requests(*zip(np.arange(30) / 30, rng.integers(1, 1200, 30), rng.integers(2, 90, 30)))
    many = msgspec.structs.replace(many, adapter=rng.integers(-1, 4, 30))
    small = msgspec.structs.replace(replica("static", COSTS, blocks=150), rules=one.rules)
    found = served_apart(two(small, small, way(1e-3, 1e-5)), many, ROUND_ROBIN)
    assert (found.whole.end_s > 0).all()


@pytest.mark.parametrize("policy", ["orca", "vllm-v1"])
def test_an_iteration_that_moves_blocks_is_no_run(policy):
    # shared blocks go to the host's memory for caches that come, and with them only one iteration takes longer
    rng = np.random.default_rng(30)
    rows = zip(np.cumsum(rng.exponential(1 / 30, 50)), rng.integers(1, 1200, 50), rng.integers(2, 90, 50))
    chains = [np.concatenate([np.arange(6) + 100 * (i % 3), 10_000 + 1000 * i + np.arange(70)]) for i in range(50)]
    asked = msgspec.structs.replace(requests(*rows), hashes=np.concatenate(chains), hash_ptr=np.arange(51) * 76)
    rules = CacheRules(prefix=True, unit=16, host_blocks=60)
    one = msgspec.structs.replace(replica(policy, COSTS, blocks=150, budget=3000), rules=rules, block_s=1e-4)
    skipped, plain = (
        served_apart(two(one, one, way(1e-3, 1e-5)), asked, ROUND_ROBIN, skips=skips) for skips in (True, False)
    )
    for name in TIMES:
        assert getattr(skipped.whole, name) == pytest.approx(getattr(plain.whole, name), rel=1e-8), name
    assert skipped.whole.spent_s[6] > 0 and skipped.whole.runs < skipped.whole.iterations
