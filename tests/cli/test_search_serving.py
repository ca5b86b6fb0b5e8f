"""``meshwright search --serve``: exit codes, the JSON, files, and what is wrong said at once."""

import json

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
