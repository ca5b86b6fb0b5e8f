"""A search ends with what follows: the command that trains, serves or exports the plan it found."""

import re

from meshwright.cli import main
from meshwright.cli.next_steps import after_search

SMALL = ["search", "gpt2", "--on", "2xh100", "--train", "batch=8,seq=1024", "--store", "none", "--fix", "pp=1"]


def test_own_executor_is_run_and_others_are_exported_to():
    both = after_search("p.toml", ["torchtitan", "megatron", "meshwright"])
    run, export = "meshwright run p.toml --data PATH", "meshwright export p.toml --to torchtitan (megatron too)"
    assert both == f"next: {run} or {export}"
    assert after_search("p.toml", ["megatron"]) == "next: meshwright export p.toml --to megatron"


def test_of_engines_the_one_asked_for_alone_is_named():
    assert after_search("p.toml", ["torchtitan", "megatron"], "megatron").endswith("p.toml --to megatron")


def test_a_plan_that_is_not_saved_is_to_be_saved_first():
    assert after_search("", ["vllm"]) == "next: add --save plan.toml, then meshwright export plan.toml --to vllm"


def test_a_plan_that_nobody_runs_is_said_to_be_run_by_none():
    assert after_search("p.toml", []).startswith("next: no engine runs this plan as it is; --for ENGINE")


def test_a_search_names_an_export_that_succeeds(tmp_path, capsys):
    plan = str(tmp_path / "plan.toml")
    assert main([*SMALL, "--save", plan]) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("next:")]
    target = re.search(r"--to ([\w-]+)", line)[1]
    assert main(["export", plan, "--to", target]) == 0


def test_a_search_for_serving_names_an_export_that_succeeds(tmp_path, capsys):
    plan, requests = str(tmp_path / "plan.toml"), "rate=2,prompt=128,output=16,requests=100"
    asked = ["search", "llama3-8b", "--on", "1xh100", "--serve", requests, "--slo", "ttft=1s,tpot=50ms@p90"]
    assert main([*asked, "--fix", "policy=vllm-v1"]) == 0
    assert "next: add --save plan.toml, then meshwright export" in capsys.readouterr().err
    assert main([*asked, "--fix", "policy=vllm-v1", "--save", plan]) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("next:")]
    assert main(["export", plan, "--to", re.search(r"--to ([\w-]+)", line)[1]]) == 0
