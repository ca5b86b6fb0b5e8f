"""The search for a serving plan: it finds what looking at everything finds, and says why each other plan lost."""

import re

import msgspec
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.search.restrict import restricted
from meshwright.search.serving.evaluate import ServingEvaluator, usd_hour
from meshwright.search.serving.find import alone, find_serving
from meshwright.search.serving.found import BEYOND, NO_ROOM
from meshwright.search.serving.space import default, engines, forms, layouts, most_replicas, words
from meshwright.search.serving.walk import ServingWalk
from meshwright.spec.serve import parse

MODEL = mw.load_model("llama3-8b")
FEW = {"fix": ("policy=vllm-v1,sarathi", "budget=0,512", "roles=together")}
WORDS = "rate=60,prompt=512,output=64,requests=400,max_batch=64"
SLO = "ttft=200ms,tpot=20ms@p90"


def cluster(text="4xh100"):
    return mw.load_cluster(text)


def asked(text, on="4xh100", few=FEW, **more):
    where, serve = cluster(on), parse(text)
    space = restricted(default(MODEL, where, serve), **few, forms=forms())
    return find_serving(MODEL, (where,), serve, spaces=(space,), **more)


def everything(text, on="4xh100"):
    """(devices, plan, engine, prediction) of every candidate of the space, each predicted by itself, at prices that all
    of them share."""
    where, serve, costs = cluster(on), parse(text), serving_costs(engine_profile().library)
    space = restricted(default(MODEL, where, serve), **FEW, forms=forms())
    for plan in layouts(space, MODEL, where, serve):
        for engine in engines(space, serve):
            for count in range(1, most_replicas(plan, where) + 1):
                layout = msgspec.structs.replace(plan.layout, dp=count)
                whole = msgspec.structs.replace(plan, layout=layout)
                question = msgspec.structs.replace(serve, engine=engine)
                yield (
                    layout.num_ranks,
                    words(whole),
                    predict_serving(MODEL, where, question, whole, costs=costs, detail=False),
                )


@pytest.fixture(scope="module")
def found():
    return asked(f"{WORDS},{SLO}")


def test_the_fewest_devices_are_those_that_looking_at_everything_finds(found):
    good = sorted((devices, plan) for devices, plan, p in everything(f"{WORDS},{SLO}") if p.good)
    assert found.proven and found.best[0].candidate.num_devices == good[0][0]
    best = {words(one.candidate.plan) for one in found.best}
    assert best <= {plan for _, plan in good}
    least = {}
    for devices, plan in good:
        least.setdefault(re.sub(r" ?dp\d+", "", plan), devices)
    assert sorted(least.values())[: len(found.best)] == sorted(one.candidate.num_devices for one in found.best)


def test_every_candidate_is_shown_or_has_a_reason(found):
    assert found.covered == len(found.best) + len(found.losers) and found.simulated < found.covered
    assert all(loser.why and loser.reason for loser in found.losers)
    said = found.to_json()
    assert sum(said["pruned"].values()) == len(said["losers"])
    assert all(row["num_devices"] >= 1 and row["why"] for row in said["losers"])


def test_who_needs_more_devices_than_the_best_has_room_for_the_model():
    """Layouts that come after the last of the best are not priced; those that cannot hold the weights say so."""
    few = {"fix": ("policy=vllm-v1", "budget=0", "roles=together")}
    model, where, serve = (
        mw.load_model("llama3-70b"),
        cluster("8xh100"),
        parse("rate=1,prompt=64,output=8,requests=20,ttft=5s,tpot=1s@p90"),
    )
    space = restricted(default(model, where, serve), **few, forms=forms())
    found = find_serving(model, (where,), serve, spaces=(space,), top=1)
    said = {words(loser.candidate.plan): loser.reason for loser in found.losers}
    assert said["dp8"] == NO_ROOM and said["tp8 dp1"] == BEYOND


def test_no_loser_by_a_bound_keeps_the_objectives():
    text = f"{WORDS},ttft=30ms,tpot=6ms@p90"
    bound = {
        (words(o.candidate.plan), o.candidate.engine.policy, o.candidate.engine.budget)
        for o in asked(text).losers
        if "(bound)" in o.why
    }
    kept = {(plan, p.serve.engine.policy, p.serve.engine.budget) for _, plan, p in everything(text) if p.good}
    assert bound and not bound & kept


def test_the_best_is_predicted_as_predict_does_it(found):
    best = found.best[0]
    again = predict_serving(MODEL, cluster(), best.prediction.serve, best.candidate.plan)
    assert again.metrics == best.prediction.metrics and again.good
    assert best.usd_hour == usd_hour(cluster(), best.candidate.num_devices)


def test_where_nothing_keeps_the_objectives_the_nearest_is_named():
    text = f"{WORDS},ttft=200ms,tpot=1ms@p90"
    missed = asked(text)
    near = missed.nearest
    assert not missed.best and near is not None
    least = min(max(o.value_s / o.bound_s for o in p.objectives) for _, _, p in everything(text))
    assert max(o.value_s / o.bound_s for o in near.prediction.objectives) == pytest.approx(least)


def test_where_no_weights_fit_nothing_is_near():
    big = mw.load_model("llama3.1-405b")
    found = find_serving(big, (cluster("2xh100"),), parse(f"rate=1,prompt=64,output=8,requests=20,{SLO}"))
    assert not found.best and found.nearest is None
    assert all("GiB without the cache" in loser.why for loser in found.losers)


def test_the_greatest_rate_is_kept_and_a_little_more_is_not():
    found = asked(f"{WORDS},{SLO}", objective="goodput", few={"fix": ("policy=vllm-v1", "budget=0", "pp=1", "tp=1,2")})
    best = found.best[0]
    serve = parse(f"{WORDS},{SLO}")
    many = serve.drawn()
    base = len(many) / many.arrival_s[-1]
    speed = best.most_rate / base

    def good(speed):
        question = msgspec.structs.replace(serve, engine=best.candidate.engine)
        requests = many.faster(speed)
        return predict_serving(MODEL, cluster(), question, best.candidate.plan, requests=requests, detail=False).good

    assert good(speed) and not good(speed * 1.03)
    assert best.most_rate == max(one.most_rate for one in found.best)


def test_an_evaluation_that_ends_early_has_the_verdict_of_the_whole():
    where, serve = cluster(), parse(f"{WORDS},ttft=20ms,tpot=6ms@p90")
    space = restricted(default(MODEL, where, serve), **FEW, forms=forms())
    many = serve.drawn()
    evaluator = ServingEvaluator(MODEL, where, serve, many, serving_costs(), engine_profile())
    walk = ServingWalk([evaluator], [space])
    early = 0
    for line in walk.lines:
        candidate = line.at(line.counts[-1])
        short, whole = evaluator.judged(candidate), evaluator.judged(candidate, whole=True)
        assert short.good == whole.good
        early += short.metrics is None
    assert early  # else nothing was shown


def test_quantised_weights_and_caches_are_searched_only_where_they_are_allowed():
    serve, where = parse(WORDS), cluster()
    usual = default(MODEL, where, serve)
    assert usual["dtype"] == ("",) and usual["kv"] == ("bf16",)
    more = restricted(usual, allow=("dtype=fp8", "kv=fp8"), forms=forms())
    plans = {words(plan) for plan in layouts(more, MODEL, where, serve)}
    assert any("fp8" in plan for plan in plans) and len(plans) == 2 * len(list(layouts(usual, MODEL, where, serve)))


def test_a_plan_that_computes_something_else_is_said_to():
    few = {"fix": ("policy=vllm-v1", "budget=0", "pp=1", "tp=1"), "allow": ("weights=int4",)}
    assert asked(f"{WORDS},{SLO}", few={"fix": few["fix"]}).remarks == ()
    assert "computes something else" in asked(f"{WORDS},{SLO}", few=few).remarks[0]


def test_words_that_were_said_are_left_as_they_are():
    serve = parse(f"{WORDS},policy=orca,budget=100")
    space = default(MODEL, cluster(), serve, ("policy", "budget"))
    assert space["policy"] == ("orca",) and space["budget"] == (100,)


def test_replicas_do_not_reach_over_nodes_that_they_would_fit_into():
    one = mw.parse_plan("tp3 dp1")
    assert most_replicas(one, mw.load_cluster("2x8xh100")) == 4  # two on each node, not five over both
    assert most_replicas(mw.parse_plan("tp8 pp2 dp1"), mw.load_cluster("4x8xh100")) == 2
    assert most_replicas(mw.parse_plan("tp8 dp1"), mw.load_cluster("4xh100")) == 0


def test_islands_of_unlike_devices_are_searched_apart_and_the_cheapest_wins():
    both = alone(mw.load_cluster("4xh100+4xa100"))
    assert [one.num_devices for one in both] == [4, 4]
    serve = parse("rate=2,prompt=256,output=32,requests=60,ttft=1s,tpot=100ms@p90,policy=vllm-v1,budget=2048")
    spaces = [default(MODEL, one, serve, ("policy", "budget")) for one in both]
    found = find_serving(
        MODEL, both, serve, spaces=spaces, objective="cost", top=20, front=("cost", "throughput", "e2e")
    )
    assert found.best[0].usd_hour == min(one.usd_hour for one in found.best) == both[1].islands[0].device.price_usd_hour
    assert {one.cluster.name for one in found.best} == {"4xh100", "4xa100"}


def test_what_cannot_be_told_is_said_at_once():
    with pytest.raises(MeshwrightError) as error:
        asked("concurrency=4,prompt=8,output=8,requests=10", objective="goodput")
    assert [d.code for d in error.value.diagnostics] == ["R014", "R014"]
    with pytest.raises(MeshwrightError, match="no objective 'speed'"):
        asked(WORDS, objective="speed")


def test_throughput_and_latency_are_objectives_of_requests_without_bounds():
    few = {"fix": ("policy=vllm-v1", "budget=0")}
    batch = "batch=64,prompt=256,output=32,max_batch=64"
    most = asked(batch, objective="throughput", few=few)
    rows = [one.prediction.metrics for one in most.best]
    assert [r.throughput_tokens_per_s for r in rows] == sorted((r.throughput_tokens_per_s for r in rows), reverse=True)
    fast = asked(batch, objective="e2e", few=few)
    assert fast.best[0].prediction.metrics.e2e_s.mean == min(o.prediction.metrics.e2e_s.mean for o in fast.best)
