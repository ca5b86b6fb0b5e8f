"""Deadlines, budgets and prices of a training run: read, held against the run, wrong ones refused together."""

import json
import re
from statistics import NormalDist

import pytest

from meshwright import predict as predicted
from meshwright import trace
from meshwright.answer.prediction import TrainingRun
from meshwright.cli import main
from meshwright.cli.question import asked, read_parts
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan
from meshwright.spec import cluster, goal, model
from meshwright.spec.workload import parse as workload

QUESTION = ["llama3-8b", "--on", "64xh100", "--train", "batch=512,seq=8192", "--plan", "fsdp"]


def said(capsys, *argv):
    code = main(["predict", *QUESTION, *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def codes(capsys, argv):
    code = main(["predict", *argv])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return re.findall(r"^error\[(\w+)\]", err, re.MULTILINE), err


@pytest.mark.parametrize(
    ("text", "days"), [("30", 30), ("30d", 30), ("30 days", 30), ("36h", 1.5), ("6w", 42), ("1.5 weeks", 10.5)]
)
def test_a_deadline_is_in_days_hours_or_weeks(text, days):
    assert goal.read_days(text) == pytest.approx(days)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "30ays", "1e9", "nan", "inf", "40000", ""])
def test_what_is_no_deadline_is_refused(text):
    with pytest.raises(MeshwrightError, match="B001"):
        goal.read_days(text)


@pytest.mark.parametrize(
    ("text", "usd"),
    [("2M", 2e6), ("750k", 750e3), ("$1,200,000", 1.2e6), ("2000 usd", 2000), ("0.5m", 5e5), ("1.5e6", 1.5e6)],
)
def test_a_budget_is_in_dollars(text, usd):
    assert goal.read_budget(text) == pytest.approx(usd)


def test_prices_are_one_for_all_or_one_for_each_kind():
    assert goal.read_price("2.10") == goal.Price(of_all=2.10)
    assert goal.read_price("h100=2.10,a100=1.2").of_device == {"h100_sxm": 2.10, "a100_80gb_sxm": 1.2}
    assert goal.read_price("3,h100=2").of_all == 3


def test_every_part_that_is_no_price_is_refused_at_once():
    with pytest.raises(MeshwrightError) as error:
        goal.read_price("h100=x,nonesuch=2,-1,h100=1,h100=2")
    assert [d.code for d in error.value.diagnostics] == ["B001", "C001", "B001", "B001"]


def test_islands_are_priced_each_by_its_kind_and_others_keep_the_catalogs_price():
    both = cluster.load("16xh100+8xa100")
    a100 = cluster.load_device("a100").price_usd_hour
    assert goal.priced(both, goal.read_price("h100=2")).total_price_usd_hour() == pytest.approx(16 * 2 + 8 * a100)
    assert goal.priced(both, goal.read_price("h100=2,a100=1")).total_price_usd_hour() == 16 * 2 + 8 * 1
    assert goal.priced(both, goal.read_price("1.5")).total_price_usd_hour() == 24 * 1.5


def test_the_cost_of_a_run_is_devices_times_hours_times_price(capsys):
    """By hand: 1e12 tokens in steps of 512 x 8192 tokens are 238,419 steps; without failures and checkpoints the run
    takes that many step times, and 64 devices at 2 dollars cost 128 dollars an hour."""
    code, answer = said(capsys, "--tokens", "1t", "--price", "2")
    run = answer["training_run"]
    assert code == 0
    assert run["num_steps"] == 238_419
    steps = {what: seconds for what, seconds, _ in run["lines"]}
    assert steps["steps"] == pytest.approx(238_419 * answer["step_time_s"])
    assert run["seconds"] == pytest.approx(steps["steps"] + steps["checkpoints"] + steps["failures"])
    assert run["usd"] == pytest.approx(run["seconds"] / 3600 * 64 * 2)
    ratio = run["seconds"] / answer["step_time_s"]
    assert run["seconds_interval"] == pytest.approx([s * ratio for s in answer["step_time_interval_s"]])
    assert run["usd_interval"] == pytest.approx([s / 3600 * 128 for s in run["seconds_interval"]])


def test_a_goal_that_is_met_exits_0_and_one_that_is_not_exits_1(capsys):
    code, answer = said(capsys, "--tokens", "1t", "--days", "365", "--budget", "10M")
    assert (code, [g["met"] for g in answer["goal"]]) == (0, [True, True])
    code, answer = said(capsys, "--tokens", "1t", "--days", "1", "--budget", "10M")
    assert (code, [g["met"] for g in answer["goal"]]) == (1, [False, True])
    assert answer["goal"][0]["probability"] < 0.01 < 0.99 < answer["goal"][1]["probability"]


def test_the_probability_of_a_deadline_is_that_of_the_log_normal_through_the_draws():
    draws = tuple(1e6 * 1.1**z for z in (-2, -1, 0, 1, 2))  # logs 0.0953 apart: their deviation is sqrt(2.5) of that
    run = TrainingRun(
        tokens=1e12,
        num_steps=1,
        seconds=1e6,
        usd=1e6,
        lines=(),
        num_devices=8,
        seconds_interval=(9e5, 1.2e6),
        usd_interval=(9e5, 1.2e6),
        draws_s=draws,
        price_usd_hour=3600.0,
        price_source="",
    )
    assert run.probability(1e6) == pytest.approx(0.5)
    assert run.probability(1e6 * 1.1) == pytest.approx(NormalDist().cdf(1 / 2.5**0.5))
    found = run.against(goal.Goal(days=1e6 / 86_400, budget_usd=1.1e6))
    assert [limit.probability for limit in found] == pytest.approx([0.5, NormalDist().cdf(1 / 2.5**0.5)])


def test_the_ends_of_the_interval_are_about_the_tenth_and_the_ninetieth_percent_of_it():
    asked_of = model.load("llama3-8b"), cluster.load("8xh100"), workload("batch=64,seq=4096,tokens=1t")
    run = predicted(*asked_of, plan("fsdp"), detail=False).run
    low, high = run.seconds_interval
    assert run.probability(low) == pytest.approx(0.1, abs=0.06)
    assert run.probability(high) == pytest.approx(0.9, abs=0.06)


def test_text_says_price_cost_and_whether_the_goal_is_met(capsys):
    assert main(["predict", *QUESTION, "--tokens", "1t", "--days", "1", "--budget", "10M", "--price", "2.10"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "$2.10 a device-hour, price as said (--price)" in out
    assert "deadline not met P(<= 1 days) = under 1%" in out
    assert "budget met P(<= $10,000,000) = over 99%" in out


def test_everything_that_a_goal_lacks_is_said_at_once(capsys):
    on_h800 = ["llama3-8b", "--on", "64xh800", "--train", "batch=512,seq=8192", "--plan", "fsdp"]
    found, err = codes(capsys, [*on_h800, "--days", "x", "--budget", "2M"])
    assert found == ["B001", "B003", "B002"]
    assert "--price h800_sxm=2.10" in err
    assert codes(capsys, [*QUESTION, "--days", "30"])[0] == ["B003"]
    assert codes(capsys, [*QUESTION, "--tokens", "many", "--price", "a100=2"])[0] == ["B004", "B001"]


def test_tokens_said_twice_and_differently_are_refused(capsys):
    twice = [*QUESTION[:4], "batch=512,seq=8192,tokens=15t", *QUESTION[5:], "--tokens", "1t"]
    found, err = codes(capsys, twice)
    assert (found, "tokens=15t and --tokens 1t" in err) == (["W005"], True)


@pytest.mark.parametrize("over", [{"tokens": "1t"}, {"train": "batch=8,seq=128,tokens=1t"}])
def test_tokens_of_an_option_go_over_those_of_a_question_file(over, tmp_path):
    file = tmp_path / "q.toml"
    file.write_text('format_version = 1\nmodel = "llama3-8b"\non = "8xh100"\ntrain = "batch=8,seq=128"\n'
                    'tokens = "2t"\nplan = "fsdp"\ndays = 30\nprice = 2.5\n')  # fmt: skip
    question = asked({"model": str(file), **over})
    (_, on, train, _), wrong = read_parts(question)
    assert (wrong, train.tokens, question.days, on.total_price_usd_hour()) == ([], 1e12, "30", 20.0)


def test_a_world_is_simulated_and_its_mean_is_the_usual_answers(capsys):
    usual = said(capsys, "--tokens", "1t")[1]["training_run"]
    _, answer = said(capsys, "--tokens", "1t", "--world", "catalog,draws=50")
    run = answer["training_run"]
    lines = {what: seconds for what, seconds, _ in run["lines"] if seconds is not None}
    assert sum(lines.values()) == pytest.approx(run["seconds"])
    # failures are rare on 64 devices: fifty draws know their part of the run to some percent of itself
    assert run["seconds"] == pytest.approx(usual["seconds"], rel=0.005)
    assert run["seconds_interval"][0] < run["seconds"] < run["seconds_interval"][1]


def test_what_a_run_meets_in_its_world_is_written_as_a_trace(capsys, tmp_path):
    file = tmp_path / "job.json"
    code, answer = said(capsys, "--tokens", "1t", "--world", "mtbf=12h,repair=1d,draws=2", "--job-trace", str(file))
    assert code == 0 and "timeline" not in answer["training_run"]
    line = trace.read(file)
    assert line.identity.workload == answer["workload"] and line.identity.source == "predicted"
    happened = [line.instants.names[what] for what in line.instants.what]
    assert (happened[0], happened[-1]) == ("began", "ended") and happened.count("failed") > 5
    assert len(line.records["event"]["at_s"]) == len(happened)


def test_a_trace_of_no_world_is_refused_with_the_option_that_lacks(capsys):
    found, err = codes(capsys, [*QUESTION, "--job-trace", "no/where.json"])
    assert found == ["X104", "X004"] and "--world" in err


def test_a_world_with_too_few_spares_takes_longer(capsys):
    seconds = [
        said(capsys, "--tokens", "1t", "--world", f"mtbf=12h,repair=1d,draws=20{more}")[1]["training_run"]["seconds"]
        for more in ("", ",spares=3", ",spares=0")
    ]
    assert seconds == sorted(seconds) and seconds[2] > 1.5 * seconds[0]


def test_what_a_world_lacks_is_said_with_everything_else_that_is_wrong(capsys):
    code, answer = said(capsys, "--world", "mtbf=soon")
    assert code == 2
    assert [e["code"] for e in answer["errors"]] == ["B003", "O001"]


def test_a_range_is_for_search_and_the_error_says_so(capsys):
    found, err = codes(capsys, [*QUESTION[:2], "8..64xh100", *QUESTION[3:]])
    assert found == ["B005"] and "meshwright search ... --on 8..64xh100" in err


def test_a_name_near_a_preset_is_told_the_presets(capsys):
    found, err = codes(capsys, ["pretrain-8b", *QUESTION[1:]])
    assert found == ["M006"] and "presets: pretrain-405b-16384-h100" in err and "pretrain-8b-64-h100" in err


def test_sync_policies_are_compared_by_their_time_to_a_loss(capfd, monkeypatch):
    asked = ["search", "gpt2", "--on", "4x1xh100,1gbe", "--train", "batch=8,seq=512,tokens=1b"]
    facets = ("tp=1", "pp=1", "cp=1", "mb=1", "zero=0", "recompute=full", "overlap=dp")
    fixed = [word for facet in facets for word in ("--fix", facet)]
    objective = ["--objective", "time-to-loss", "--allow", "sync=local:h=100"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*asked, *fixed, *objective]) == 0
    shown = capfd.readouterr()
    assert "\n     sync=local:h=100 dp4 mb1" in shown.out and max(map(len, shown.out.splitlines())) <= 80
    said = " ".join(shown.out.split())
    assert said.startswith("sync=local:h=100: ")
    assert "times sooner than the best plan found of sync=step; dp4 mb1" in said
    assert "searching plans of sync=local:h=100" in shown.err
    assert main([*asked, *objective[:2], "--top", "3", "--report", "x.html"]) == 2
    err = capfd.readouterr().err
    assert "drop --top" in err and "drop --report" in err
