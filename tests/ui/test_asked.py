"""The page's texts are read without opening a file that they name."""

import json

import pytest

from meshwright.spec import cluster, model
from meshwright.ui.asked import AskedTexts, read
from tests.cli.tiny import CONFIG


def codes(**texts):
    return {(control, d.code) for control, d in read(AskedTexts(**texts)).wrong}


def test_a_complete_question_is_read_like_the_command_line_s():
    found = read(AskedTexts(model="llama3-8b", on="8xh100", train="batch=8,seq=512", plan="tp2"))
    assert found.wrong == () and found.model == model.load("llama3-8b") and found.cluster == cluster.load("8xh100")
    assert (found.train.global_batch, found.plan.layout.tp) == (8, 2)


def test_everything_that_is_missing_or_wrong_is_said_at_once_by_its_control():
    assert codes() == {("model", "X004"), ("on", "X004"), ("train", "X004")}
    found = codes(model="lama", on="8xh1000", train="batch=x,sec=2", plan="tp2 tq2", framework="none-such")
    assert found == {
        ("model", "M006"),
        ("on", "C001"),
        ("train", "W001"),
        ("train", "W002"),
        ("train", "W003"),
        ("plan", "P001"),
        ("framework", "X020"),
    }


@pytest.mark.parametrize("name", ["config.json", "/etc/passwd", "~/x", "a/b", "..\\x", "C:/x", "x.JSON"])
def test_a_model_that_is_a_path_is_refused_whether_the_file_is_there_or_not(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ("model", "I007") in codes(model=name)


def test_a_folder_of_the_working_directory_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIG))
    assert model.load("mine").num_layers == 2
    assert ("model", "M006") in codes(model="mine")


@pytest.mark.parametrize(
    ("texts", "control"),
    [
        ({"on": "mine.toml"}, "on"),
        ({"on": "MINE.TOML"}, "on"),
        ({"train": "batch=1,seq=2,lengths=lengths.csv"}, "train"),
        ({"train": "batch=1,seq=2,lengths=lengths.txt"}, "train"),
        ({"train": "batch=1,seq=2,lengths=lengths.jsonl#tokens"}, "train"),
        ({"plan": "plan.toml"}, "plan"),
        ({"plan": "/tmp/x"}, "plan"),
    ],
)
def test_files_of_clusters_lengths_and_plans_are_refused(texts, control, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(cluster.to_toml(cluster.load("8xh100")))
    (tmp_path / "lengths.csv").write_text("512\n")
    (tmp_path / "plan.toml").write_text("format_version = 1\n")
    assert (control, "I007") in codes(**texts)


def test_an_alias_with_a_slash_is_a_name_and_not_a_path(tmp_path, monkeypatch):
    alias = next(name for name in model.known_names() if "/" in name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / alias).mkdir(parents=True)
    (tmp_path / alias / "config.json").write_text(json.dumps(CONFIG))
    assert read(AskedTexts(model=alias)).model.num_layers != 2


def test_pasted_files_go_before_names():
    pasted = cluster.to_toml(cluster.load("16xa100"))
    found = read(
        AskedTexts(model="mine", config=json.dumps(CONFIG), on="8xh100", cluster=pasted, train="batch=8,seq=64")
    )
    assert found.model.num_layers == 2 and found.model.name == "mine"
    assert found.cluster.num_devices == 16


@pytest.mark.parametrize("text", ["{", "[" * 99_000, "[1]", '"x"', "{}"])
def test_a_pasted_config_that_is_none_says_so(text):
    assert {control for control, code in codes(config=text) if code.startswith("M")} == {"model"}
