"""Fairness between tenants and latencies of groups, worked out by hand."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright import serving
from meshwright.answer.fairness import fairness, group_metrics
from meshwright.answer.serving import predict_serving
from meshwright.simulate.serve_pool import served_alone
from meshwright.spec.serve import parse
from tests.serving.costs import replica, requests


def served_by(order, tenants, *, prompt=100, output=10, max_batch=1):
    asked = requests(*((0.001 * i, prompt, output) for i in range(len(tenants))))
    asked = msgspec.structs.replace(asked, tenant=np.array(tenants))
    one = msgspec.structs.replace(replica("vllm-v1", max_batch=max_batch), order=serving.get("order", order))
    return [asked], [served_alone(one, asked)]


def test_service_is_prompts_that_begin_and_twice_what_is_generated():
    # one at a time, 10 s each: tenant 0's four go first while tenant 1's four wait. Both wait from when tenant 1 comes,
    # the first prompt has begun then, until the fourth begins: two prompts of 100 and three answers of 10 x 2
    found = fairness(*served_by("fcfs", [0, 0, 0, 0, 1, 1, 1, 1]))
    assert found.service_gap_tokens == pytest.approx(260, rel=0.02) and found.jain_index == pytest.approx(0.5, abs=0.02)
    assert found.contended == pytest.approx(3 / 8, abs=0.02)  # three of eight requests of equal length


def test_served_by_turns_two_tenants_are_never_more_than_a_request_apart():
    found = fairness(*served_by("vtc", [0, 0, 0, 0, 1, 1, 1, 1]))
    assert found.service_gap_tokens <= 1.1 * 120 and found.jain_index > 0.95


def test_tenants_that_never_wait_together_are_not_compared():
    assert fairness(*served_by("fcfs", [0, 0, 0])) is None
    assert fairness(*served_by("fcfs", [0, 1], max_batch=2)) is None


def test_every_tenant_has_its_own_latencies_and_share_of_kept_objectives():
    # requests of 10 s one behind the other: tenant 0's first tokens after 1 and 11 s, tenant 1's after 21 s
    shares, served = served_by("fcfs", [0, 0, 1])
    serve = parse("batch=3,prompt=100,output=10,ttft=12s,tenants=a+b")
    first, second = group_metrics(serve, shares, served)
    assert (first.name, first.requests, second.name, second.requests) == ("tenant a", 2, "tenant b", 1)
    assert first.ttft_s.mean == pytest.approx(6.0, abs=0.01) and second.ttft_s.mean == pytest.approx(21.0, abs=0.01)
    assert (first.attainment, second.attainment) == (1.0, 0.0)


def test_priorities_and_their_objectives_are_groups_of_their_own():
    serve = parse("batch=4,prompt=100,output=4,priority=1+0,ttft=10s,ttft.1=1ms")
    asked = msgspec.structs.replace(
        requests(*((0.0, 100, 4) for _ in range(4))), priority=np.array([1, 0, 0, 1]), slo=np.array([1, 0, 0, 1])
    )
    found = group_metrics(serve, [asked], [served_alone(replica("vllm-v1"), asked)])
    assert [(one.name, one.attainment) for one in found] == [
        ("priority 0", 1.0),
        ("priority 1", 0.0),
        ("objectives of the workload", 1.0),
        ("objectives of priority 1", 0.0),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("order=vtc", "order=vtc goes by tenants"),
        ("order=dlpm:4096,tenants=2", ""),
        ("routing=d2lpm", "routing=d2lpm goes by tenants"),
        ("order=deadline", "order=deadline goes by when a first token is wanted"),
        ("order=deadline,ttft=1s", ""),
        ("order=dynasor", "order=dynasor goes by queries"),
        ("order=priority", "order=priority goes by priorities"),
        ("order=lpm", "order=lpm goes by shared prefixes"),
        ("order=lpm,prefix=16,prefix_cache=yes", ""),
        ("order=sjf", ""),
    ],
)
def test_a_policy_that_goes_by_what_no_request_says_is_warned_of(words, said):
    model, cluster, plan = mw.load_model("llama3-8b"), mw.load_cluster("2xh100"), mw.parse_plan("dp2")
    serve = parse(f"rate=4,prompt=64,output=4,requests=8,{words}")
    found = predict_serving(model, cluster, serve, plan, detail=False).warnings
    assert any(one.startswith(said) for one in found) if said else not any(" goes by " in one for one in found)
