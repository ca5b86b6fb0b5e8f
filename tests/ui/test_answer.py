"""Answers: the figures of `predict`, errors where they belong, and the question to take away."""

import json
import shlex
import tomllib

import pytest

from meshwright.answer.predict import predict
from meshwright.cli import main
from meshwright.cost import standard_on
from meshwright.papers.whatif import what_if
from meshwright.plan.text import read as read_plan
from meshwright.spec import cluster, model, workload
from meshwright.ui import answer as answers
from meshwright.ui.answer import PANELS, AnswerRequest, PanelRequest, answer, panel
from meshwright.ui.asked import AskedTexts
from meshwright.ui.recipes import RecipesRequest, recipes
from tests.cli.tiny import CONFIG
from tests.ui.local import asked as question


def asked(**changes):
    return AskedTexts(**question(**changes))


def told(**changes):
    return answer(AnswerRequest(asked=asked(**changes)))


def controls_of(found):
    return {(e["code"], control) for e in found["errors"] for control in e["controls"]}


def test_the_verdict_is_predict_s():
    parts = (model.load("llama3-8b"), cluster.load("8xh100"), workload.parse("batch=64,seq=2048"))
    expected = predict(*parts, read_plan("tp2 pp2 vpp2 zero1"), costs=standard_on(parts[1]), detail=False)
    found = told()
    assert found["errors"] == [] and found["verdict"]["step_time_s"] == expected.step_time_s
    assert found["verdict"]["fits"] is expected.fits and found["verdict"]["plan"] == expected.plan.text()


@pytest.mark.parametrize(
    ("changes", "code", "control"),
    [
        ({"plan": "tp3"}, "P011", "tp"),
        ({"plan": "tp16"}, "P010", "tp"),
        ({"plan": "tp2 pp2 vpp99"}, "P013", "vpp"),
        ({"plan": "mb48"}, "P014", "mb"),
        ({"plan": "ep2"}, "P017", "ep"),
        ({"plan": "cp2 ulysses4"}, "P015", "algorithm"),
        ({"plan": "pp2 dualpipe zero3"}, "P020", "zero"),
        ({"plan": "tp2 what"}, "P001", "plan"),
        ({"train": "batch=64,seq=2048,optimiser=x"}, "W001", "train"),
        ({"train": "batch=x,seq=2048"}, "W002", "batch"),
        ({"on": "8xh1000"}, "C001", "on"),
        ({"framework": "zzz"}, "X020", "framework"),
    ],
)
def test_an_error_is_at_the_control_it_concerns(changes, code, control):
    assert (code, control) in controls_of(told(**changes))


def test_all_errors_come_at_once_with_the_product_s_own_texts():
    found = told(model="lama3-8b", on="x", plan="tq")
    assert {"M006", "C001", "P001"} <= {e["code"] for e in found["errors"]}
    assert next(e for e in found["errors"] if e["code"] == "M006")["help"].startswith("did you mean llama3-8b")
    assert "verdict" not in found


def test_an_illegal_plan_comes_with_the_nearest_legal_one_which_is_then_used():
    found = told(plan="tp3 pp2")
    mended = answer(AnswerRequest(asked=asked(plan="tp3 pp2"), mend=True))
    assert found["mended"] == mended["asked"]["plan"] and mended["errors"] == []
    assert told(plan=found["mended"])["errors"] == []


def test_moves_change_the_plan_and_the_workload_in_their_order():
    found = answer(AnswerRequest(asked=asked(), moves={"batch": 32, "tp": 4, "zero": 3}))
    assert found["asked"]["train"] == "batch=32,seq=2048"
    values = {name: found["controls"][name]["value"] for name in ("tp", "zero")}
    assert values == {"tp": 4, "zero": 3} and found["errors"] == []


def test_a_move_to_what_no_plan_has_is_an_error_at_its_control():
    assert controls_of(answer(AnswerRequest(asked=asked(), moves={"tp": 7}))) == {("I009", "tp")}


@pytest.mark.parametrize(
    "moves",
    [{"tp": True}, {"tp": 0}, {"dp": 0}, {"zero": 4}, {"tp": "x"}, {"tp": -4}, {"zzz": 1}, {"batch": -5}, {"sp": 3}],
)
def test_a_move_of_another_type_or_name_changes_nothing(moves):
    assert answer(AnswerRequest(asked=asked(), moves=moves))["asked"]["plan"] == question()["plan"]


def test_the_command_and_the_file_ask_the_same_question(tmp_path, capsys, monkeypatch):
    found = told()
    file = tmp_path / "question.toml"
    file.write_text(found["toml"])
    assert tomllib.loads(found["toml"]) == {"format_version": 1, **question()}
    for words in (shlex.split(found["command"])[1:], ["predict", str(file)]):
        assert main([*words, "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["step_time_s"] == found["verdict"]["step_time_s"]


@pytest.mark.parametrize("name", PANELS)
def test_every_panel_is_the_report_s_section_without_inline_styles(name):
    html = panel(PanelRequest(asked=asked(), panel=name))["html"]
    assert "<section" in html and ' style="' not in html and "<style" not in html
    assert "onclick" not in html and html.count("<script") == html.count('<script type="application/json"')


def test_what_a_user_wrote_is_escaped_in_html():
    name = '"><img src=x onerror=alert(1)> style="x'
    found = AskedTexts(model=name, config=json.dumps(CONFIG), on="2xh100", train="batch=8,seq=64", plan="tp2")
    parts = [answer(AnswerRequest(asked=found))["html"]]
    parts += [panel(PanelRequest(asked=found, panel=name))["html"] for name in PANELS]
    for text in parts:
        assert "<img" not in text


def test_recipes_bring_what_whatif_says_and_those_switched_on_are_compared_with_the_plan_without():
    base = asked(plan="tp2 pp2")
    rows = {row["id"]: row for row in recipes(RecipesRequest(asked=base))["recipes"]}
    found = what_if(("zero-bubble",), *answers.read(base).parts, costs=answers.read(base).costs)
    assert rows["zero-bubble"]["gain"] == found.gain and rows["zero-bubble"]["memory_bytes"] == found.memory_bytes
    assert rows["usp"]["error"].startswith("usp needs context parallelism")
    on = {r["id"]: r for r in recipes(RecipesRequest(asked=asked(plan="tp2 pp2", tries=("zero-bubble",))))["recipes"]}
    assert on["zero-bubble"]["on"] and on["zero-bubble"]["gain"] == found.gain
    assert on["gpipe"]["instead"] == ["zero-bubble"]  # both set the schedule
    with_it = told(plan="tp2 pp2", tries=("zero-bubble",))["verdict"]
    assert with_it["tried"]["gain"] == found.gain and with_it["step_time_s"] == found.after.step_time_s
    assert with_it["plan"] == found.after.plan.text()


def test_a_run_with_a_deadline_a_budget_and_a_price_is_judged_as_predict_judges_it(capsys):
    goal = {"tokens": "10b", "days": "30", "budget": "1k", "price": "2.5"}
    found = told(**goal)
    assert found["errors"] == []
    main([*shlex.split(found["command"])[1:], "--json"])
    said = json.loads(capsys.readouterr().out)
    assert [limit["met"] for limit in found["verdict"]["limits"]] == [limit["met"] for limit in said["goal"]]
    assert len(said["goal"]) == 2
    assert controls_of(told(days="30")) == {("B003", "days")}
    assert {c for _, c in controls_of(told(days="x", budget="y", price="z", tokens="w"))} == set(goal)


def test_with_a_framework_the_answer_and_its_command_overlap_what_it_does(capsys):
    found = told(framework="megatron-core")
    main([*shlex.split(found["command"])[1:], "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (found["verdict"]["plan"], found["verdict"]["step_time_s"]) == (said["plan"], said["step_time_s"])
    before = found["controls"]["overlap_pp"]["value"]
    moved = answer(AnswerRequest(asked=asked(framework="megatron-core"), moves={"overlap_pp": not before}))
    assert moved["controls"]["overlap_pp"]["value"] is not before and moved["errors"] == []
    kept = answer(AnswerRequest(asked=asked(framework="megatron-core"), moves={"tp": 1}))["asked"]["plan"]
    assert "overlap=" not in kept
