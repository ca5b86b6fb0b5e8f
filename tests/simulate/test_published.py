"""Published times of iterations as a replica's costs, against the published formula."""

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import engine_profile
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.simulate.published import table
from meshwright.simulate.serve import simulate
from meshwright.spec.serve import parse as parse_serve
from tests.serving.costs import replica, requests

ONE = engine_profile("distserve").published("opt-13b", "a100_80gb_sxm", 2)  # 14.743 + 0.068577 t + 2.4496e-6 t^2 ms


def test_prompts_and_answers_take_what_was_published():
    costs = table(ONE, tokens=4096, batch=200, context=2048)
    a, b, c = ONE.prefill_ms
    served = simulate(replica("vllm-v0", costs), requests((0.0, 800, 1), (1.0, 500, 1), (1.0, 500, 1)))
    assert served.first_s[0] == pytest.approx((a + 800 * b + 800**2 * c) * 1e-3)
    assert served.first_s[1] - 1.0 == pytest.approx((a + 1000 * b + 2 * 500**2 * c) * 1e-3)
    a, b, c = ONE.decode_ms
    one = simulate(replica("vllm-v0", costs), requests((0.0, 800, 2)))
    assert one.end_s[0] - one.first_s[0] == pytest.approx((a + 801 * b + c) * 1e-3)


def test_from_a_number_of_sequences_on_other_constants_hold():
    costs = table(ONE, tokens=4096, batch=200, context=2048)
    for count, (a, b, c) in ((94, ONE.decode_ms), (95, ONE.large_decode_ms)):
        seconds = costs.linear_s[count] + costs.decoding(count, 1000.0)
        assert seconds == pytest.approx((a + b * count * 1000 + c * count) * 1e-3)


def test_the_causes_of_published_times_sum_to_them():
    costs = table(ONE, tokens=64, batch=8, context=64)
    assert costs.linear_parts.sum(axis=1) == pytest.approx(costs.linear_s)


def test_an_engine_of_published_times_is_a_word_of_a_workload():
    node = mw.load_cluster("4xa100_80gb_sxm")
    plan = parse("prefill=[tp2 dp1 on=0:2] + decode=[dp1 on=2:3] prefill->decode:kv")
    words = "rate=0.01,prompt=800,output=2,requests=3,engine=distserve,policy=vllm-v0"
    found = predict_serving(mw.load_model("opt-13b"), node, parse_serve(words), plan, detail=False)
    a, b, c = ONE.prefill_ms
    assert found.metrics.ttft_s.mean == pytest.approx((a + 800 * b + 800**2 * c) * 1e-3)


def test_what_nobody_published_is_refused():
    node, words = mw.load_cluster("4xa100_80gb_sxm"), "rate=1,prompt=8,output=2,requests=3,engine=distserve"
    with pytest.raises(MeshwrightError, match="no iterations of opt-13b on a100_80gb_sxm tp2 adp2"):
        predict_serving(mw.load_model("opt-13b"), node, parse_serve(words), parse("tp2 adp2"))
    with pytest.raises(MeshwrightError, match="no iterations of llama3-8b"):
        predict_serving(mw.load_model("llama3-8b"), node, parse_serve(words), parse("tp2"))
