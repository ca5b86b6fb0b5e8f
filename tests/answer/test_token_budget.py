"""The token budget that follows from an objective."""

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.answer.token_budget import budget_within
from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica, requests


def test_the_budget_is_the_most_tokens_of_an_iteration_within_the_objective():
    # 5 ms and 10 us a token: of 20 ms 15 are left, 1,500 tokens, of which 11 whole tiles of 128 are 1,408
    one = replica("sarathi", linear_costs(base=5e-3, token=1e-5, tokens=8192), max_batch=16)
    asked = requests(*((0.0, 1000, 100) for _ in range(40)))
    assert budget_within(one, asked, 20e-3) == 1408
    assert budget_within(one, asked, 1e-3) == 128 and budget_within(one, asked, 1.0) == 8192


def test_those_who_decode_behind_long_contexts_leave_less_of_the_budget():
    # 16 sequences behind 1,050 tokens on average at 0.5 us a token of context take 8.4 ms of the 15: 6.6 ms are left
    costs = linear_costs(base=5e-3, token=1e-5, decode=5e-7, tokens=8192)
    asked = requests(*((0.0, 1000, 100) for _ in range(40)))
    assert budget_within(replica("sarathi", costs, max_batch=16), asked, 20e-3) == 640


def test_the_answer_says_the_budget_that_was_found_and_keeps_the_objective():
    model, cluster, plan = mw.load_model("llama3-8b"), mw.load_cluster("1xh100"), mw.parse_plan("tp1")
    words = "rate=4,prompt=4096,output=128,requests=120,policy=sarathi,max_batch=64"
    tight, loose = (
        predict_serving(model, cluster, parse(f"{words},budget=auto,tpot={bound}"), plan, detail=False)
        for bound in ("30ms", "120ms")
    )
    assert 128 <= tight.serve.engine.budget < loose.serve.engine.budget and tight.metrics.itl_s.p99 <= 0.030
    assert parse(tight.serve.text()).engine.budget == tight.serve.engine.budget
    assert parse(f"{words},budget=auto,tpot=30ms").text().endswith("budget=auto")


def test_a_budget_that_follows_from_nothing_is_refused():
    model, cluster, plan = mw.load_model("llama3-8b"), mw.load_cluster("1xh100"), mw.parse_plan("tp1")
    with pytest.raises(MeshwrightError) as caught:
        predict_serving(model, cluster, parse("batch=1,prompt=8,output=8,policy=orca,budget=auto"), plan)
    assert [one.code for one in caught.value.diagnostics] == ["W003", "W005"]
