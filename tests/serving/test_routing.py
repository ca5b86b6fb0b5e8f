"""Where requests go: by turn, by load, by two choices; and replicas side by side on one clock."""

from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.serving.cache import CacheRules
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.power_of_two import two_of
from meshwright.simulate.serve_pool import pooled
from meshwright.simulate.serve_pool import served_alone as simulate
from tests.serving.costs import linear_costs, replica, requests


class Load(NamedTuple):
    waiting: int
    running: int
    tokens: int
    blocks: int = 0

    @property
    def open(self):
        return self.waiting + self.running

    def cached(self, hashes):
        return min(self.blocks, len(hashes))


LOADS = [Load(2, 3, 900), Load(0, 4, 100), Load(1, 3, 50)]


def asked_of(number):
    return NewRequest(number, 8, 2)


def test_round_robin_goes_in_turn():
    router = serving.get("routing", "round-robin")
    asked = requests(*((i, 8, 2) for i in range(5)))
    assert router.assign(asked, 3).tolist() == [0, 1, 2, 0, 1]
    assert [router.choose(asked_of(i), LOADS) for i in range(4)] == [0, 1, 2, 0]


def test_least_loaded_takes_the_first_of_those_with_the_fewest_open_requests():
    assert serving.get("routing", "least-loaded").choose(asked_of(7), LOADS) == 1  # 5, 4 and 4 open


def test_two_choices_are_different_and_even():
    pairs = [two_of(i, 4) for i in range(4000)]
    assert all(a != b and min(a, b) >= 0 and max(a, b) < 4 for a, b in pairs)
    counts = np.bincount(np.array(pairs).ravel(), minlength=4)
    assert counts.min() > 0.9 * counts.mean() and two_of(5, 1) == (0, 0)


def test_power_of_two_takes_the_less_loaded_of_its_two():
    router = serving.get("routing", "power-of-two")
    for i in range(30):
        a, b = two_of(i, 3)
        assert router.choose(asked_of(i), LOADS) in (a, b) and LOADS[router.choose(asked_of(i), LOADS)].open == min(
            LOADS[a].open, LOADS[b].open
        )


def test_a_request_follows_its_prefix_unless_little_is_there_or_the_replica_is_overloaded():
    router = serving.get("routing", "prefix-aware")
    asked = NewRequest(0, 160, 2, hashes=tuple(range(10)))
    loads = [Load(0, 90, 0, blocks=8), Load(0, 40, 0, blocks=4), Load(0, 60, 0)]
    assert router.choose(asked, loads) == 0  # 90 open requests are 50 more than 40, not 64
    assert router.choose(asked, [Load(0, 110, 0, blocks=8), *loads[1:]]) == 1  # 70 more, and 2.75 times as many
    assert router.choose(asked, [Load(0, 90, 0, blocks=3), Load(0, 40, 0)]) == 1  # 3 of 10 blocks are no more than 30%
    assert router.choose(NewRequest(0, 160, 2), loads) == 1  # no prefix is known


def test_a_tenant_leaves_its_prefix_where_its_credit_there_is_used_up():
    # a quantum of 100: 40 tokens of prompt, of which 20 are at replica 0, and 2 x 30 for the answer are 80 there
    router = serving.get("routing", "d2lpm:100").open()
    asked = NewRequest(0, 40, 30, tenant=5, hashes=(1, 2))
    loads = [Load(0, 9, 0, blocks=1), Load(0, 3, 0)]
    assert [router.choose(asked, loads) for _ in range(2)] == [0, 0] and router.left == {(5, 0): -60, (5, 1): 100}
    assert router.choose(asked, loads) == 1 and router.left == {(5, 0): -60, (5, 1): 0}
    assert router.choose(asked, loads) == 0 and router.left == {(5, 0): -40, (5, 1): 100}  # a quantum each: 40 - 80
    assert router.choose(NewRequest(1, 40, 30, tenant=6, hashes=(1, 2)), loads) == 0  # another tenant's own credit


def test_following_prefixes_finds_more_in_the_caches_than_by_load():
    rng = np.random.default_rng(2)
    group = rng.integers(0, 6, 60)
    asked = msgspec.structs.replace(
        requests(*((0.9 * i, 160, 4) for i in range(60))),
        tenant=group,
        hashes=np.concatenate(
            [[100 * g + k if k < 9 else 1000 + 100 * i for k in range(10)] for i, g in enumerate(group)]
        ),
        hash_ptr=np.arange(61) * 10,
    )
    one = msgspec.structs.replace(replica("vllm-v1", blocks=60), rules=CacheRules(prefix=True))

    def found(routing):
        return sum(s.cached.sum() for s in pooled(one, 3, asked, serving.get("routing", routing))[1])

    assert found("prefix-aware") > 1.2 * found("least-loaded") > 0 and found("d2lpm") > found("least-loaded")


@pytest.mark.parametrize("concurrency", [0, 9])
def test_one_replica_behind_a_router_does_what_it_does_alone(concurrency):
    rng = np.random.default_rng(3)
    asked = requests(
        *zip(np.cumsum(rng.exponential(0.02, 60)), rng.integers(1, 400, 60), rng.integers(1, 40, 60)),
        concurrency=concurrency,
    )
    one = replica("vllm-v1", linear_costs(base=0.01, token=1e-5), blocks=60)
    shares, served = pooled(one, 1, asked, serving.get("routing", "least-loaded"))
    alone = simulate(one, asked)
    assert len(shares) == 1 and served[0].end_s == pytest.approx(alone.end_s) and served[0].evictions == alone.evictions
    assert served[0].spent_s == pytest.approx(alone.spent_s)


def test_by_load_a_long_request_keeps_others_away():
    # iterations of a second; request 0 has 100 tokens to come, the others 2: in turn every second one waits behind it
    one = replica("orca", linear_costs(base=1.0), max_batch=1)
    asked = requests((0.0, 8, 100), *((0.1 + 4.0 * i, 8, 2) for i in range(8)))
    shares, served = pooled(one, 2, asked, serving.get("routing", "least-loaded"))
    assert [len(share) for share in shares] == [1, 8]
    assert (served[1].first_s - served[1].arrival_s).max() < 1.5
    turns = [asked.chosen(np.arange(9) % 2 == k) for k in (0, 1)]
    assert (simulate(one, turns[0]).first_s - turns[0].arrival_s).max() > 60


@pytest.mark.parametrize("name", serving.names("routing"))
def test_every_request_is_served_by_one_replica(name):
    rng = np.random.default_rng(4)
    asked = requests(*zip(np.cumsum(rng.exponential(0.3, 50)), rng.integers(1, 90, 50), rng.integers(1, 20, 50)))
    shares, served = pooled(replica("vllm-v1"), 3, asked, serving.get("routing", name))
    assert sum(map(len, shares)) == 50 and all((one.end_s > one.arrival_s).all() for one in served)
