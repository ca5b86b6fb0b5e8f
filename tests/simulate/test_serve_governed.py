"""Replicas on parts of their devices, by hand, and skipped runs against every iteration by itself."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.cost.part import OPERATIONS, TRAFFIC
from meshwright.simulate.serve_beside import SharedByJobs
from meshwright.simulate.serve_governed import GovernedPool
from tests.serving.costs import linear_costs, replica, requests


class HalfOperations:
    """Parts on which iterations take 1 / (share of the multiprocessors) as long; a quarter of a whole iteration is
    multiplying, a half of it the memory's traffic."""

    def __init__(self, costs):
        self.costs = costs

    def on(self, table, part):
        return self.longer(table, 1.0 / part.sms)

    def roofline(self, part):
        return self.longer(self.costs, {OPERATIONS: 0.25, TRAFFIC: 0.5}[part])

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
