"""When an engine looks for new requests, and when it lets prompts in: hand calculations, and the fast loop against the
plain one."""

import msgspec
import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.serving import names
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import served_alone
from meshwright.simulate.served import HostTimes
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica, requests

COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 17)
COSTS = msgspec.structs.replace(COSTS, own_s=3e-5 * np.arange(500.0))


def gated(policy="vllm-v1", costs=None, *, poll=1, batch_wait=0, fill=0.0, groups=1, settle=0, **rest):
    found = replica(policy, costs, **rest)
    gate = {"poll": poll, "batch_wait": batch_wait, "fill": fill, "groups": groups, "settle": settle}
    limits = msgspec.structs.replace(found.limits, **gate)
    return msgspec.structs.replace(found, limits=limits)


def test_an_engine_that_polls_sees_a_request_at_its_next_look():
    # iterations of a second each: a prompt until 1 s, after which it looks at once, and then at 5 s, when it sees what
    # came at 1.5 s. After that prompt it looks at 6 s and 7 s, and then, as nobody is there, at 11 s
    served = simulate(gated(poll=4), requests((0.0, 8, 20), (1.5, 8, 2), (6.0, 8, 2), (8.5, 8, 2)))
    assert served.scheduled_s.tolist() == [0.0, 5.0, 6.0, 11.0]


def test_an_idle_engine_that_polls_takes_a_request_at_once():
    served = simulate(gated(poll=30), requests((0.0, 8, 2), (7.25, 8, 2)))
    assert served.scheduled_s.tolist() == [0.0, 7.25]


def test_prompts_wait_until_they_fill_a_share_of_the_budget_or_time_is_up():
    # half of 100 tokens: one decodes, a prompt of 20 that comes at 1.5 s waits from 2 s on. At 4 s another one of 30 is
    # there: 1 + 50 tokens. Alone it would have waited three iterations, as the last one does
    asked = requests((0.0, 8, 20), (1.5, 20, 1), (3.5, 30, 1), (8.5, 8, 1))
    served = simulate(gated(batch_wait=3, fill=0.5, budget=100), asked)
    assert served.scheduled_s.tolist() == [0.0, 4.0, 4.0, 12.0]


def test_prompts_wait_until_each_attention_group_has_one():
    # two groups with an answer each under way since 0 s; a third prompt waits for a fourth
    asked = requests((0.0, 8, 20), (0.0, 8, 20), (1.5, 8, 3), (3.5, 8, 3), (5.5, 8, 3))
    served = simulate(gated(batch_wait=9, groups=2), asked)
    assert served.scheduled_s.tolist() == [0.0, 0.0, 4.0, 4.0, 13.0]


def test_prompts_wait_on_for_others_once_each_attention_group_has_one():
    # as before, but that the prompts of 4 s wait three iterations more, until 7 s, when a third one is there
    asked = requests((0.0, 8, 20), (0.0, 8, 20), (1.5, 8, 3), (3.5, 8, 3), (5.5, 8, 3))
    served = simulate(gated(batch_wait=9, groups=2, settle=3), asked)
    assert served.scheduled_s.tolist() == [0.0, 0.0, 7.0, 7.0, 7.0]


@pytest.mark.parametrize("policy", names("batching"))
@pytest.mark.parametrize(
    ("gate", "concurrency"),
    [
        ({"poll": 7}, 0),
        ({"poll": 7}, 20),
        ({"batch_wait": 9, "groups": 4}, 20),
        ({"batch_wait": 9, "groups": 3, "settle": 4}, 20),
        ({"batch_wait": 25, "groups": 3, "poll": 3}, 0),
        ({"batch_wait": 9, "fill": 0.8, "poll": 3}, 0),
        ({"batch_wait": 25, "groups": 3, "max_batch": 3}, 0),  # a full batch, while others come
        ({"batch_wait": 3, "groups": 2, "settle": 9, "max_batch": 64}, 0),
    ],
)
def test_the_fast_loop_has_the_gate_of_the_plain_one(policy, gate, concurrency):
    rng = np.random.default_rng(5)
    at = np.arange(60) * 0.05 if concurrency else np.cumsum(rng.exponential(1 / 25, 60))
    asked = requests(*zip(at, rng.integers(1, 900, 60), rng.integers(1, 80, 60)), concurrency=concurrency)
    sizes = {"blocks": 300, "budget": 700, "max_batch": 12}
    one = gated(policy, COSTS, host=HostTimes(step_s=1e-3), **sizes | gate)
    fast, plain = simulate(one, asked), served_alone(one, asked, skips=False)
    skipping = served_alone(one, asked)
    for name in ("arrival_s", "scheduled_s", "first_s", "end_s"):
        assert getattr(fast, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
        assert getattr(skipping, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert fast.iterations == plain.iterations and fast.evicted.tolist() == plain.evicted.tolist()


def test_a_share_of_the_budget_to_wait_for_needs_a_time_to_wait():
    with pytest.raises(MeshwrightError) as caught:
        parse("concurrency=4,requests=8,prompt=10,output=10,fill=0.5")
    assert "fill=" in caught.value.diagnostics[0].message and "batch_wait=" in caught.value.diagnostics[0].help
