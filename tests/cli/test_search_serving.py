"""``meshwright search --serve``: exit codes, the JSON, files, and what is wrong said at once."""

import json

import pytest

from meshwright.cli import main

BASE = ["search", "llama3-8b", "--on", "2xh100", "--fix", "policy=vllm-v1", "--fix", "budget=0"]
WORDS = "rate=4,prompt=256,output=32,requests=60"


def test_an_answer_names_devices_plan_engine_and_reasons(capsys):
    assert main([*BASE, "--serve", WORDS, "--slo", "ttft=500ms,tpot=50ms@p90", "--goodput"]) == 0
    said = capsys.readouterr().out
    for part in ("1 device: dp1 policy=vllm-v1", "proven best", "requests/s", "Why plans were rejected", "sure"):
        assert part in said, part


def test_the_json_has_devices_and_why_every_other_lost(capsys):
    assert main([*BASE, "--serve", WORDS, "--slo", "ttft=500ms", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_devices"] == said["best"][0]["num_devices"] == 1 and said["proven_optimal"]
    assert said["covered"] == len(said["best"]) + len(said["losers"])
    assert all(row["why"] and row["num_devices"] for row in said["losers"])
    assert said["best"][0]["ttft_s"]["mean_interval"] and 0 <= said["best"][0]["sure"] <= 1


def test_objectives_that_no_plan_keeps_are_exit_code_1_with_the_nearest(capsys):
    assert main([*BASE, "--serve", WORDS, "--slo", "tpot=1ms", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["best"] == [] and said["nearest"]["plan"] == "tp2 dp1" and not said["nearest"]["good"]
    assert main([*BASE, "--serve", WORDS, "--slo", "tpot=1ms"]) == 1
    assert "Nearest" in capsys.readouterr().out


def test_a_saved_plan_is_predicted_with_its_requests(capsys, tmp_path):
    path = str(tmp_path / "plan.toml")
    assert main([*BASE, "--serve", WORDS, "--slo", "ttft=500ms", "--save", path]) == 0
    capsys.readouterr()
    assert main(["predict", path, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["good"] and said["num_devices"] == 1 and "policy=vllm-v1" not in said["serve"]  # the usual policy


def test_everything_that_is_wrong_is_said_at_once(capsys):
    words = ["search", "llama3-8b", "--on", "3zh100", "--train", "batch=8,seq=8", "--top", "x", "--slo", "speed=1"]
    assert main([*words, "--serve", "rate=0,prompt=8,output=8"]) == 2
    said = capsys.readouterr().err
    assert [said.count(f"error[{code}]") > 0 for code in ("X004", "R002", "W001", "W002")] == [True] * 4


def test_a_restriction_that_is_none_of_serving_is_refused(capsys):
    assert main(["search", "llama3-8b", "--on", "1xh100", "--serve", WORDS, "--slo", "ttft=1s", "--fix", "zero=1"]) == 2
    assert "no facet 'zero'" in capsys.readouterr().err


def test_options_of_serving_beside_a_training_step_are_refused(capsys):
    assert main(["search", "llama3-8b", "--on", "1xh100", "--train", "batch=8,seq=512", "--slo", "ttft=1s"]) == 2
    assert "--slo is of requests" in capsys.readouterr().err


def test_a_sweep_of_rates_has_the_best_plan_at_each(capsys):
    slo = ["--slo", "ttft=500ms,tpot=50ms@p90", "--fix", "nano=1"]
    serve = "rate=10,prompt=1024,output=64,requests=200"
    assert main([*BASE, "--serve", serve, *slo, "--rates", "5,40,2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["rate_req_per_s"] for row in said["rates"]] == [2, 5, 40] and said["good"]
    devices = [row["num_devices"] for row in said["rates"]]
    assert devices == sorted(devices) and devices[-1] == 2
    assert main([*BASE, "--serve", serve, *slo, "--rates", "2,4000"]) == 1
    assert "1 of 2 rates have a plan" in capsys.readouterr().out


def test_wrong_rates_are_refused(capsys):
    assert main([*BASE, "--serve", WORDS, "--slo", "ttft=1s", "--rates", "1,x,-2", "--day", "low=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("is not a rate") == 2 and "--rates are of several plans" in said
    closed = "concurrency=4,prompt=8,output=8,requests=10"
    assert main([*BASE, "--serve", closed, "--slo", "ttft=1s", "--rates", "1"]) == 2
    assert "come at no rate" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["distserve-low", "distserve-high"])
def test_halves_that_are_placed_apart_are_saved_with_their_question(strategy, capsys, tmp_path):
    path = str(tmp_path / "plan.toml")
    asked = ["search", "llama3-8b", "--on", "2xh100", "--serve", "rate=1,prompt=200,output=20,requests=40"]
    assert main([*asked, "--slo", "ttft=500ms,tpot=50ms@p90", "--strategy", strategy, "--save", path]) == 0
    said = capsys.readouterr()
    assert "Answers alone" in said.out and f"wrote {path}" in said.err and "next:" in said.err
    assert main(["predict", path]) == 0
    assert "prefill->decode:kv" in capsys.readouterr().out


def test_a_strategy_of_training_is_refused_with_those_of_serving(capsys):
    assert (
        main(["search", "llama3-8b", "--on", "2xh100", "--serve", WORDS, "--slo", "ttft=1s", "--strategy", "beam"]) == 2
    )
    assert "say distserve-high or distserve-low" in capsys.readouterr().err


def test_what_loses_to_another_engine_setting_is_said_to_keep_the_objectives(capsys):
    two = ["search", "llama3-8b", "--on", "1xh100", "--fix", "policy=vllm-v1,vllm-v0", "--fix", "budget=0"]
    assert main([*two, "--serve", WORDS, "--slo", "ttft=500ms,tpot=50ms@p90", "--json"]) == 0
    whys = [row["why"] for row in json.loads(capsys.readouterr().out)["losers"]]
    assert any(why.startswith("keeps the objectives, its worst latency at ") and "; vllm-v" in why for why in whys)
    assert main([*two, "--serve", WORDS, "--slo", "ttft=500ms,tpot=50ms@p90"]) == 0
    said = capsys.readouterr().out
    assert " 1 device  " in said and "1 devices" not in said
