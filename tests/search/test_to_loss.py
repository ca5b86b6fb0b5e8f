"""Time to a loss: policies by the step time of their best plans times the steps they need, slow ones given up."""

import io
import json
from math import inf

import msgspec
import pytest
from rich.console import Console

from meshwright.answer.predict import predict
from meshwright.cli import main
from meshwright.plan import parse
from meshwright.report.to_loss_text import render
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.search.to_loss import find_to_loss, usual_policies
from meshwright.spec.cluster import load
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train
from meshwright.sync.policy import read
from meshwright.sync.studies import read_study
from meshwright.sync.tokens import tokens_factor

ONE = ("tp=1", "pp=1", "cp=1", "mb=1", "zero=0", "recompute=full", "schedule=1f1b", "overlap=dp")
POLICIES = ("step", "int8", "powersgd", "local:h=16", "local:h=100", "demo", "step:combine=median")


@pytest.fixture(scope="module")
def asked():
    return load_model("gpt2"), load("4x1xh100,1gbe"), parse_train("batch=8,seq=512,tokens=1b")


@pytest.fixture(scope="module")
def answer(asked):
    return find_to_loss(*asked, restricted(default(*asked), fix=ONE), POLICIES)


def by_hand(asked, policy):
    """Seconds of the one plan of the space: its predicted step, times the steps to the loss."""
    model, cluster, train = asked
    plan = parse(f"dp4 mb1 full overlap=dp sync={policy}")
    step = predict(model, cluster, train, plan, detail=False).step_time_s
    return step * tokens_factor(read(policy), 1e9, 4).value * 1e9 / (8 * 512)


def test_the_soonest_policy_is_that_of_every_plan_by_hand(asked, answer):
    seconds = {policy: by_hand(asked, policy) for policy in POLICIES[:5]}
    assert answer.best.policy == min(seconds, key=seconds.get)
    assert {one.policy for one in answer.policies} >= {"step", answer.best.policy}
    for one in answer.policies:
        assert one.seconds == pytest.approx(seconds[one.policy])
        assert one.low < one.seconds < one.high
    assert [one.seconds for one in answer.policies] == sorted(one.seconds for one in answer.policies)
    assert {one.policy for one in answer.policies} | set(answer.slower) == set(seconds)
    assert all(seconds[policy] > answer.best.seconds for policy in answer.slower)


def test_policies_of_another_optimizer_or_of_no_study_are_named_with_the_reason(answer):
    why = dict(answer.unknown)
    assert "optimizer=sgd" in why["demo"] and "meshwright converge" in why["step:combine=median"]


def test_a_search_with_a_cap_finds_no_slower_plan(asked):
    space = restricted(default(*asked), fix=ONE)
    best = find(*asked, space=space).best[0].prediction.step_time_s
    assert find(*asked, space=space, cap_s=best / 2).best == ()
    assert find(*asked, space=space, cap_s=inf).best


def test_a_workload_without_tokens_is_taken_to_have_twenty_for_each_parameter(asked):
    model, cluster, _ = asked
    train = parse_train("batch=8,seq=512")
    found = find_to_loss(model, cluster, train, restricted(default(model, cluster, train), fix=ONE), ("step",))
    assert found.assumed and found.tokens == 20 * model.num_params
    assert found.to_json()["policies"][0]["tokens_factor"]["basis"] == "exact"


def test_rounds_that_are_fewer_than_a_study_has_seen_are_named_and_not_compared(asked):
    """500 steps alone, of a run of 2,048 steps of 4,096 tokens that takes about four times as many: four rounds and
    more, as the shortest run of the catalog's study had two; of a run of 128 steps it is one."""
    model, cluster, _ = asked
    train = parse_train("batch=8,seq=512,tokens=524288")
    found = find_to_loss(model, cluster, train, restricted(default(model, cluster, train), fix=ONE), ("local:h=500",))
    assert "rounds of 500 steps" in dict(found.unknown)["local:h=500"] and found.best is None


def study(folder, steps, losses, replicas=2):
    """A folder as meshwright converge leaves it: losses by policy, of runs of so many steps of 64 tokens."""
    words = {"model": "tiny", "train": "batch=2,seq=32", "replicas": replicas, "lr": 1e-3, "text": "sample"}
    folder.mkdir(exist_ok=True)
    (folder / "study.json").write_text(json.dumps(words))
    for policy, loss in losses.items():
        run = folder / "runs" / f"{policy}-{steps}".replace(":", "-")
        run.mkdir(parents=True)
        of = {"policy": policy, "seed": 0, "steps": steps, "tokens": 64 * steps, "loss": loss, "sent_per_token": 1.0}
        (run / "result.json").write_text(json.dumps(of))


def test_a_study_of_ones_own_is_gone_by(asked, tmp_path):
    """sync=step has a loss of 4 after 64 steps and of 3 after 256; local:h=16 is at 3.5 after 256, where step was after
    128: it takes twice the tokens."""
    study(tmp_path / "own", 64, {"step": 4.0})
    study(tmp_path / "own", 256, {"step": 3.0, "local:h=16": 3.5, "feedback=dfa": 3.9})
    known = read_study(tmp_path / "own")
    policy = read("local:h=16")
    assert tokens_factor(policy, 64 * 256, 2, known).value == pytest.approx(2.0)
    assert usual_policies(known)[:2] == ("step", "local:h=16")
    found = find_to_loss(*asked, restricted(default(*asked), fix=ONE), ("step", "local:h=16"), known=known)
    assert found.study == str(tmp_path / "own") and found.policies[-1].factor.study in ("", found.study)
    local = next(one for one in found.policies if one.policy == "local:h=16")
    assert local.factor.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("steps", "losses", "why"),
    [
        ((), {}, "No such file"),
        ((64,), {"step": 4.0, "int8": 4.0}, "one number of steps"),
        ((64, 128), {"step": 4.0}, "alone"),
    ],
)
def test_a_folder_whose_runs_tell_no_factor_is_refused(steps, losses, why, tmp_path, capsys):
    for count in steps:
        study(tmp_path / "own", count, losses)
    words = ["gpt2", "--on", "4x1xh100,1gbe", "--train", "batch=8,seq=512", "--study", str(tmp_path / "own")]
    assert main(["search", *words, "--objective", "time-to-loss"]) == 2
    said = capsys.readouterr().err
    assert "error[X006]" in said and why in said
    assert main(["search", *words]) == 2 and "add --objective time-to-loss" in capsys.readouterr().err


def test_tokens_are_said_as_everywhere_and_a_command_to_type_stands_on_one_line(answer):
    console = Console(file=io.StringIO(), width=80)
    render(msgspec.structs.replace(answer, tokens=161e9, assumed=True), console)
    shown = console.file.getvalue()
    assert "after 161B tokens" in shown and "arXiv 2203.15556" in shown
    assert "meshwright explain tokens_factor" in shown
