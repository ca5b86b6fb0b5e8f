"""Where requests go: by turn, by load, by two choices; and replicas side by side on one clock."""

from typing import NamedTuple

import numpy as np
import pytest

from meshwright import serving
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.power_of_two import two_of
from meshwright.simulate.serve_pool import pooled
from meshwright.simulate.serve_pool import served_alone as simulate
from tests.serving.costs import linear_costs, replica, requests


class Load(NamedTuple):
    waiting: int
    running: int
    tokens: int

    @property
    def open(self):
        return self.waiting + self.running


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
