"""`meshwright diff`: two answers, from files or asked now, and what happens to files that are neither."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

SHARED = ["llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=4096"]
PLANS = ["--plan", "fsdp", "--plan", "tp2 fsdp"]


def said(capsys, *argv):
    code = main(["diff", *argv])
    return code, *capsys.readouterr()


def errors(err):
    return re.findall(r"^error\[(\w+)\]: (.*)$", err, re.MULTILINE)


@pytest.fixture
def saved(tmp_path, capsys):
    """Two saved predictions."""
    paths = []
    for name, plan in (("a", "fsdp"), ("b", "tp2 fsdp")):
        assert main(["predict", *SHARED, "--plan", plan, "--json"]) == 0
        path = tmp_path / f"{name}.json"
        path.write_text(capsys.readouterr().out)
        paths.append(str(path))
    return paths


def test_two_plans_are_asked_and_compared(capsys):
    code, out, err = said(capsys, *SHARED, *PLANS)
    assert (code, err) == (0, "")
    assert re.match(r"B is .* (slower|faster) than A", out)


def test_rates_of_images_count_images(capsys):
    asked = ["resnet-50", "--on", "8xh100", "--train", "batch=2048,image=224", "--plan", "dp8", "--plan", "dp8 mb256"]
    _, out, _ = said(capsys, *asked)
    assert "images/s/GPU" in out and "tokens/s" not in out
    _, out, _ = said(capsys, *asked[:-4], "--plan", "dp8 mb256", "--plan", "dp8")
    assert re.match(r"B is .* slower than A \([\d,.]+ times as long\)", out)


def test_json_is_one_object_whose_causes_sum_to_the_difference(capsys):
    code, out, err = said(capsys, *SHARED, *PLANS, "--json")
    delta = json.loads(out)
    assert (code, err, delta["format_version"]) == (0, "", 1)
    assert sum(c["change"] for c in delta["causes"]) == pytest.approx(delta["step_time_s"]["change"])
    assert (delta["only_a"], delta["only_b"]) == (["dp8"], ["tp2", "dp4"])


def test_saved_predictions_compare_as_when_asked_now(capsys, saved):
    now = json.loads(said(capsys, *SHARED, *PLANS, "--json")[1])
    assert json.loads(said(capsys, *saved, "--json")[1]) == now


def test_clusters_are_compared_when_given_twice(capsys):
    argv = ["llama3-8b", "--on", "8xh100", "--on", "8xa100", "--train", "batch=64,seq=4096", "--plan", "fsdp", "--json"]
    code, out, _ = said(capsys, *argv)
    delta = json.loads(out)
    assert code == 0
    assert (delta["a"]["cluster"], delta["b"]["cluster"]) == ("8xh100", "8xa100")
    assert delta["step_time_s"]["change"] > 0  # an A100 has a third of the peak


def test_a_question_file_compares_with_a_saved_prediction(capsys, saved, tmp_path):
    question = tmp_path / "q.toml"
    question.write_text(
        'format_version = 1\nmodel = "llama3-8b"\non = "8xh100"\ntrain = "batch=64,seq=4096"\nplan = "fsdp"\n'
    )
    code, out, _ = said(capsys, str(question), saved[0], "--json")
    assert code == 0
    assert json.loads(out)["step_time_s"]["change"] == 0


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_format_version_is_refused_with_the_command_that_converts(version, capsys, saved):
    file = Path(saved[0])
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": version}))
    code, _, err = said(capsys, *saved)
    assert code == 2
    what = "missing" if version is None else repr(version)
    assert errors(err) == [("X007", f"format_version is {what}, this version reads 1")]
    assert "convert it: meshwright predict llama3-8b --on 8xh100 --train batch=64,seq=4096 --plan" in err


def test_json_that_is_no_prediction_is_refused(capsys, saved, tmp_path):
    for name, text in (("list", "[]"), ("other", '{"format_version": 1, "model": "x"}')):
        (tmp_path / f"{name}.json").write_text(text)
    code, _, err = said(capsys, str(tmp_path / "list.json"), str(tmp_path / "other.json"))
    assert code == 2
    assert [c for c, _ in errors(err)] == ["X009", "X009"]


def test_files_that_do_not_exist_are_both_named(capsys):
    code, _, err = said(capsys, "a.json", "b.toml")
    assert code == 2
    assert [c for c, _ in errors(err)] == ["X006", "X006"]


def test_nothing_given_twice_is_told_how(capsys):
    code, _, err = said(capsys, *SHARED, "--plan", "fsdp")
    assert code == 2
    assert errors(err) == [("X010", "both sides are the same question")]


def test_a_third_value_is_refused(capsys):
    code, _, err = said(capsys, *SHARED, *PLANS, "--plan", "tp4 fsdp")
    assert code == 2
    assert errors(err)[0][0] == "X010"


def test_a_mistake_that_both_sides_share_is_said_once(capsys):
    code, _, err = said(capsys, "nothing-like-it", *SHARED[1:], *PLANS)
    assert code == 2
    assert [c for c, _ in errors(err)] == ["M006"]


def test_one_file_alone_misses_the_other(capsys, saved):
    code, _, err = said(capsys, saved[0])
    assert code == 2
    assert errors(err) == [("X004", "B is missing")]
