"""Placements of prefill and decode apart, by DistServe's algorithms."""

import json

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.search.serving.split import HIGH, LOW, TOLERANCE, find_split
from meshwright.simulate.serve_apart import served_answers
from meshwright.spec.serve import parse as parse_serve
from tests.serving.costs import linear_costs, replica, requests

NODE = mw.load_cluster("4xa100_80gb_sxm")
OPT = mw.load_model("opt-13b")
WORDS = "rate=4.6875,prompt=756,output=64,requests=100,engine=distserve,policy=vllm-v0"
BOUNDS = "ttft=200ms,tpot=50ms@p90"


def found(strategy, words=f"{WORDS},{BOUNDS}", cluster=NODE):
    serve = parse_serve(words)
    return find_split(OPT, cluster, serve, serve.drawn(), strategy=strategy)


def test_answers_alone_begin_with_their_caches():
    # an iteration of a second: of three tokens the first is there, and two are computed
    served = served_answers(replica("vllm-v1", linear_costs(base=1.0)), requests((0.0, 8, 3), (0.5, 8, 1), (4.0, 8, 2)))
    assert served.first_s.tolist() == [0.0, 0.5, 4.0] and served.end_s.tolist() == [2.0, 0.5, 5.0]


def test_a_pair_in_a_node_keeps_the_objectives_up_to_its_rate_and_not_beyond():
    best = found(LOW).placements[0]
    assert best.plan and (best.prefills, best.decodes) == (1, 1)
    serve = parse_serve(f"{WORDS},{BOUNDS}")
    base = 99 / float(serve.drawn().arrival_s[-1])
    for factor, good in ((1.0, True), (1 + 2 * TOLERANCE, False)):
        speed = best.rate_per_device * best.devices * factor / base
        answer = predict_serving(OPT, NODE, serve, parse(best.plan), requests=serve.drawn().faster(speed), detail=False)
        assert answer.good is good


def test_both_halves_are_repeated_as_often_as_the_rate_needs():
    large = mw.load_cluster("4x8xa100_80gb_sxm")
    words = WORDS.replace("rate=4.6875", "rate=30")
    answer = found(HIGH, f"{words},{BOUNDS}", large)
    best = next(one for one in answer.placements if one.plan)
    asked = 99 / float(parse_serve(words).drawn().arrival_s[-1])
    for count, name, rates in (
        (best.prefills, best.prefill, answer.prefill_rates),
        (best.decodes, best.decode, answer.decode_rates),
    ):
        each = rates[name] * parse(name).on(1).layout.num_ranks
        assert count * each >= asked * (1 - 1e-9) and (count - 1) * each < asked
    pools = parse(best.plan).on(32).pools
    assert [pool.plan.layout.dp for pool in pools] == [best.prefills, best.decodes] and answer.answer is not None


def test_pairs_are_repeated_inside_nodes():
    one = found(LOW).placements[0]
    rate = 1.5 * one.rate_per_device * one.devices
    answer = found(LOW, f"{WORDS.replace('4.6875', f'{rate:g}')},{BOUNDS}", mw.load_cluster("2x4xa100_80gb_sxm"))
    best = answer.placements[0]
    plan = parse(best.plan)
    assert (best.prefill, best.decode, best.prefills) == (one.prefill, one.decode, 2)
    assert [pool.devices[0] // 4 for pool in plan.pools] == [0, 0, 1, 1]
    assert [link.text() for link in plan.links] == ["prefill0->decode0:kv", "prefill1->decode1:kv"]


def test_a_bound_below_a_prompt_alone_has_no_placement():
    # 800 tokens on four ranks take 12.06 + 30.47 + 0.33 = 42.9 ms
    answer = found(LOW, f"{WORDS.replace('756', '800')},ttft=40ms,tpot=50ms@p90")
    assert not answer.placements and not answer.good and set(np.unique([*answer.prefill_rates.values()])) == {0.0}


def test_what_placements_are_made_for_has_to_be_said():
    for words in (WORDS, f"{WORDS},ttft=1s", "concurrency=4,prompt=8,output=8,requests=8,ttft=1s,tpot=1s"):
        with pytest.raises(MeshwrightError, match="R014"):
            found(LOW, words)


def test_the_command_places_them_and_saves_the_plan(capsys, tmp_path):
    args = ["search", "opt-13b", "--on", "4xa100_80gb_sxm", "--serve", WORDS, "--slo", BOUNDS, "--strategy", LOW]
    assert main([*args, "--json", "--save", str(tmp_path / "p.toml")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["good"] and answer["placements"][0]["rate_per_device"] > 1
    assert mw.parse_plan(str(tmp_path / "p.toml")) == parse(answer["placements"][0]["plan"])
    assert main(args) == 0 and "requests/s for each device" in capsys.readouterr().out
    assert main([*args, "--day", "low=1"]) == 2
