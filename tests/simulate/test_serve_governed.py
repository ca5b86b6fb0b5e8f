"""Replicas on parts of their devices, by hand, and skipped runs against every iteration by itself."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.cost.part import OPERATIONS, STARTS, TRAFFIC
from meshwright.cost.power import Draw
from meshwright.simulate.serve_beside import SharedByJobs
from meshwright.simulate.serve_governed import GovernedPool
from meshwright.simulate.serve_powered import CappedRow
from tests.serving.costs import linear_costs, replica, requests


class HalfOperations:
    """Parts on which iterations take 1 / (share of the multiprocessors) as long; a quarter of a whole iteration is
    multiplying, a half of it the memory's traffic."""

    def __init__(self, costs):
        self.costs = costs

    def on(self, table, part):
        return self.longer(table, 1.0 / (part.sms * part.clock))

    def roofline(self, part):
        return self.longer(self.costs, {OPERATIONS: 0.25, TRAFFIC: 0.5, STARTS: 0.0}[part])

    def arithmetic(self):
        return self.longer(self.costs, 0.25)

    @staticmethod
    def longer(table, factor):
        names = ("linear_s", "sampled_s", "decode_s", "prefill_s")
        return msgspec.structs.replace(table, **{name: getattr(table, name) * factor for name in names})


class Job:
    def traffic(self, share):
        return 0.5

    def speed(self, share, other):
        return share * (1.0 - 0.5 * other)


def governed(policy, costs, asked, *, replicas=1, jobs=None, skips=True):
    governor = SharedByJobs(serving.get("sharing", policy), jobs or [Job()] * replicas)
    router = serving.get("routing", "round-robin")
    pool = GovernedPool(replica(costs=costs), replicas, asked, router, HalfOperations(costs), governor, skips=skips)
    shares, served = pool.served()
    return governor, shares, served


def test_a_fixed_share_by_hand():
    costs = linear_costs(base=0.2)
    governor, _, (served,) = governed("fixed-share:0.5", costs, requests((1.0, 4, 5)))
    # an iteration takes 0.4 s on half of the multiprocessors: the prompt's and four more from 1 s on
    assert served.first_s[0] == pytest.approx(1.4) and served.end_s[0] == pytest.approx(3.0)
    # of 3 s one is idle; of two seconds a quarter (0.5 of 0.2 in 0.4) is traffic beside which the job has half
    assert governor.seconds == pytest.approx(3.0)
    assert governor.done_s[0] == pytest.approx(0.5 * 2.5 + 0.25 * 0.5)
    assert governor.used[0].running == pytest.approx(2.0) and governor.used[0].alone == pytest.approx(1.0)
    assert governor.used[0].operations == pytest.approx(0.25)
    spent = dict(zip(("linear", "slower", "idle"), served.spent_s[[0, 9, 5]]))
    assert spent == pytest.approx({"linear": 1.0, "slower": 1.0, "idle": 1.0})


def test_without_a_job_it_is_the_plain_simulation():
    from meshwright.simulate.serve import simulate

    costs = linear_costs(base=0.02, token=1e-4, decode=1e-6, prefill=1e-4)
    asked = requests(*((0.3 * i, 50 + i, 40) for i in range(30)))
    _, _, (served,) = governed("muxflow", costs, asked, jobs=[None])
    plain = simulate(replica(costs=costs), asked)
    np.testing.assert_allclose(served.end_s, plain.end_s, rtol=1e-9)


@pytest.mark.parametrize("policy", ["muxflow:3", "fixed-share:0.25"])
def test_skipped_runs_are_every_iteration_by_itself(policy):
    rng = np.random.default_rng(1)
    costs = linear_costs(base=0.01, token=1e-4, decode=1e-6, prefill=1e-4)
    at = np.sort(rng.uniform(0, 20, 40))
    asked = requests(*((t, int(p), int(o)) for t, p, o in zip(at, rng.integers(5, 60, 40), rng.integers(2, 90, 40))))
    fast, slow = (governed(policy, costs, asked, replicas=2, skips=skips) for skips in (True, False))
    for one, other in zip(fast[2], slow[2]):
        np.testing.assert_allclose(one.end_s, other.end_s, rtol=1e-6)
        assert one.spent_s.sum() == pytest.approx(other.spent_s.sum(), rel=1e-6)
    np.testing.assert_allclose(fast[0].done_s, slow[0].done_s, rtol=1e-3)
    assert fast[0].shares_s.min() > 0


def capped(costs, asked, row):
    router = serving.get("routing", "round-robin")
    return GovernedPool(replica(costs=costs), 2, asked, router, HalfOperations(costs), row).served()[1]


def test_the_power_of_a_row_by_hand_and_clocks_of_low_priority_alone():
    costs = linear_costs(base=0.5)
    row = CappedRow(
        serving.get("power", "polca"),
        Draw(100.0, 400.0, 0.5),
        devices=2,
        host_w=50.0,
        replicas=2,
        num_low=1,
        budget_w=1000.0,
    )
    asked = requests((0.0, 4, 8), (0.0, 4, 8))
    pool = GovernedPool(
        replica(costs=costs), 2, asked, serving.get("routing", "round-robin"), HalfOperations(costs), row
    )
    _, (low, high) = pool.served()
    # a quarter of the time is multiplying, half of it traffic that draws half: 100 + 300 x (0.25 + 0.5 x 0.5) = 250 W
    # a device, 300 W with its host, 1,200 W of four: over the budget, so that clocks are braked to 288 of 1,410 MHz
    assert row.peak_w == pytest.approx(1200.0)
    assert row.log[0].event.drawn == pytest.approx(1.2) and row.passed_s[3] > 0
    assert low.end_s[0] == high.end_s[0] > 8 * 0.5


def test_capped_clocks_slow_servers_of_low_priority_first():
    costs = linear_costs(base=0.5)
    draw = Draw(100.0, 400.0, 0.5)
    sizes = {"devices": 1, "host_w": 0.0, "replicas": 2, "num_low": 1, "budget_w": 600.0}
    row = CappedRow(serving.get("power", "polca"), draw, **sizes)
    asked = requests((0.0, 4, 21), (0.0, 4, 21))
    pool = GovernedPool(
        replica(costs=costs), 2, asked, serving.get("routing", "round-robin"), HalfOperations(costs), row
    )
    _, (low, high) = pool.served()
    # two devices draw 250 W each, 0.83 of the budget: above the first threshold, and not below it by five points then
    assert high.end_s[0] == pytest.approx(21 * 0.5)
    # four iterations in the two seconds before the first look, and 17 that take 1,410 / 1,275 times as long
    assert low.end_s[0] == pytest.approx(2.0 + 17 * 0.5 * 1410 / 1275)


def test_caps_act_later_where_they_need_time():
    costs = linear_costs(base=0.5)
    sizes = {"devices": 1, "host_w": 0.0, "replicas": 2, "num_low": 1, "budget_w": 600.0, "acts_s": 4.0}
    row = CappedRow(serving.get("power", "polca"), Draw(100.0, 400.0, 0.5), **sizes)
    low, _ = capped(costs, requests((0.0, 4, 21), (0.0, 4, 21)), row)
    # decided at 2 s, there at 6 s: twelve iterations at the full clock
    assert low.end_s[0] == pytest.approx(6.0 + 9 * 0.5 * 1410 / 1275)
