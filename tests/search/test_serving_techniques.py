"""What-ifs of serving: every technique that can be said is tried, and ranked by what it gains."""

import json

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cli import main
from meshwright.cli.whatif_serving import _exact
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.search.serving.evaluate import ServingEvaluator
from meshwright.search.serving.techniques import Technique, put_over, techniques, what_helps
from meshwright.spec.serve import parse

MODEL, CLUSTER = mw.load_model("llama3-8b"), mw.load_cluster("2xh100")
SERVE = parse("rate=30,prompt=512,output=32,requests=150,ttft=500ms,tpot=50ms@p90")
PLAN = mw.parse_plan("dp2").on(2)


@pytest.fixture(scope="module")
def ranking():
    evaluator = ServingEvaluator(MODEL, CLUSTER, SERVE, SERVE.drawn(), serving_costs(), engine_profile())
    tried = [Technique(words, True) for words in ("kv=fp8", "policy=static", "dispatch=sent", "prefix_cache=yes")]
    return what_helps(evaluator, PLAN, tried)


def test_an_attempt_is_what_predict_says_of_the_same_words(ranking):
    static = next(one for one in ranking.attempts if one.technique.words == "policy=static")
    serve, plan = put_over(SERVE, PLAN, "policy=static")
    assert static.metrics == predict_serving(MODEL, CLUSTER, serve, plan, detail=False).metrics


def test_the_best_is_first_and_what_cannot_be_is_last_with_its_reason(ranking):
    values = [ranking.value(one) for one in ranking.attempts if not one.why]
    assert values == sorted(values, reverse=True) and ranking.gain(ranking.attempts[-1]) == 0.0
    assert ranking.attempts[-1].technique.words == "dispatch=sent" and "there is one" in ranking.attempts[-1].why


def test_what_changes_nothing_is_known_to(ranking):
    # requests without common blocks find nothing in a prefix cache
    cached = next(one for one in ranking.attempts if one.technique.words == "prefix_cache=yes")
    assert not ranking.changes(cached) and ranking.gain(cached) == pytest.approx(1.0, rel=0.02)


def test_progress_is_told_before_every_simulation_and_counts_the_plan_itself():
    evaluator = ServingEvaluator(MODEL, CLUSTER, SERVE, SERVE.drawn(), serving_costs(), engine_profile())
    told = []
    what_helps(evaluator, PLAN, [Technique("policy=static", True)], lambda done, total: told.append((done, total)))
    assert told[0] == (0, 2) and told[-1] == (2, 2) and told == sorted(told)
    # the greatest rates of the plan and of the technique are bisected, of each by more than one simulation
    assert told.count((0, 2)) > 2 and told.count((1, 2)) > 2


def test_every_registered_policy_and_serving_field_is_a_technique():
    words = {one.words for one in techniques(MODEL, CLUSTER, SERVE)}
    assert {"policy=sarathi", "policy=past-future", "routing=least-loaded", "kv=fp8", "weights=int4", "nano2"} <= words
    assert "policy=vllm-v1" not in words  # it is so already
    exact = {one.words: one.exact for one in techniques(MODEL, CLUSTER, SERVE)}
    assert exact["policy=sarathi"] and not exact["kv=fp8"] and not exact["weights=int4"]


def test_words_go_over_the_engine_or_the_plan_and_wrong_ones_are_refused():
    serve, plan = put_over(SERVE, PLAN, "policy=sarathi,weights=int4")
    assert serve.engine.policy == "sarathi" and serve.rate == 30 and plan.precision.weights == "int4"
    assert plan.layout.dp == 2
    with pytest.raises(MeshwrightError) as error:
        put_over(SERVE, PLAN, "max_batch=0,wieghts=int4")
    assert len(error.value.diagnostics) == 2
    assert _exact("policy=sarathi,nano2") and not _exact("weights=int4") and not _exact("fp8")


def test_a_word_may_say_what_is_usual_over_an_engine_that_has_something_else():
    serve = parse("rate=1,prompt=9,output=9,policy=sarathi,kv=fp8,prefix_cache=yes")
    changed, _ = put_over(serve, PLAN, "policy=vllm-v1,kv=bf16,prefix_cache=no")
    assert changed.engine == parse("rate=1,prompt=9,output=9").engine


def test_words_of_a_draft_are_read_together_and_what_is_no_technique_is_refused():
    serve, _ = put_over(SERVE, PLAN, "draft=ngram,accept=0.7")
    assert (serve.engine.draft, serve.engine.accept) == ("ngram", 0.7)
    with pytest.raises(MeshwrightError) as error:
        put_over(SERVE, PLAN, "rate=5,engine=vllm,ttft=1s,policy=orca")
    said = [(one.code, one.message) for one in error.value.diagnostics]
    assert said == [
        ("W001", "rate= is of the requests and their objectives, and no technique"),
        ("W001", "engine= is of another engine's costs, and no technique"),
        ("W001", "ttft= is of the requests and their objectives, and no technique"),
    ]


def test_a_technique_that_loses_is_said_to_lose(capsys):
    """Eight tokens in an iteration, where all of a prompt go at once otherwise."""
    words = ["whatif", "llama3-8b", "--on", "1xh100", "--plan", "dp1", "--serve", "batch=4,prompt=256,output=4"]
    assert main([*words, "--try", "policy=sarathi,budget=8"]) == 0
    assert "it loses: 0." in capsys.readouterr().out


def test_the_command_ranks_and_says_what_is_wrong(capsys):
    words = ["whatif", "llama3-8b", "--on", "2xh100", "--plan", "dp2"]
    serve = ["--serve", "rate=30,prompt=512,output=32,requests=100", "--slo", "ttft=500ms,tpot=50ms@p90"]
    assert main([*words, *serve, "--try", "policy=sarathi,kv=fp8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["attempts"][0]["gain"] > 0 and not said["attempts"][0]["exact"]
    assert main([*words, *serve, "--try", "policy=sarathi"]) == 0
    assert "in time" in capsys.readouterr().out
    assert main([*words, *serve, "--try", "policy=no-such", "--train", "batch=8,seq=8"]) == 2
    said = capsys.readouterr().err
    assert "X004" in said
