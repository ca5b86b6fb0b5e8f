"""Feeds, data workers and recipes as a user meets them: commands, their JSON, and what is refused."""

import json
import re

import pytest

from meshwright.cli import main
from meshwright.spec.feed import parse
from tests.cli.tiny import tiny

ASKED = ["llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=4096", "--plan", "fsdp mb1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny(tmp_path)


def codes(err):
    return re.findall(r"^error\[(\w+)\]", err, re.MULTILINE)


def test_a_step_before_and_after_other_words_of_its_feed(capsys):
    assert main(["whatif", *ASKED, "--feed", "workers=1,latency=800ms", "--try", "workers=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["before"]["feed"]["bound"] == "workers" and found["before"]["feed"]["enough"] == 2
    assert found["after"]["feed"]["bound"] == "step"
    assert found["after"]["step_time_s"] < 0.6 * found["before"]["step_time_s"]
    assert main(["whatif", *ASKED, "--feed", "workers=1", "--try", "wrkers=2"]) == 2
    assert codes(capsys.readouterr().err) == ["W001"]
    assert main(["predict", *ASKED, "--feed", "workers=1,threshold=4,keep=2"]) == 2
    assert codes(capsys.readouterr().err) == ["W002", "W005"]
    assert main(["predict", *ASKED, "--feed", "workers=1,latency=800"]) == 2  # of seconds, hardly
    assert "latency = '800' is not a time with its unit, such as 2ms" in capsys.readouterr().err
    assert parse("workers=1,tokenise=1.2e+03ns/token").work["tokenise"].seconds == pytest.approx(1.2e-6)


def test_a_run_says_what_its_steps_waited_beside_what_was_predicted(capfd):
    pytest.importorskip("torch")
    words = ["tiny/config.json", "--on", "1xh100", "--train", "batch=4,seq=32,dtype=fp32", "--plan", "dp1"]
    run = ["run", *words, "--data", "sample", "--device", "cpu", "--steps", "4"]
    assert main([*run, "--data-workers", "1", "--prefetch", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["data_s"]) == 4 and found["data"]["workers"] == 1
    assert found["data"]["make_s"] > 0 and found["data"]["measured_s"] >= 0 and found["data"]["predicted_s"] >= 0
    assert main([*run, "--prefetch", "2"]) == 2 and codes(capfd.readouterr().err) == ["L005"]


def test_the_reading_of_a_text_is_measured_as_words_of_a_feed(capsys):
    pytest.importorskip("torch")
    assert main(["calibrate", "--text", "sample", "--train", "batch=4,seq=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    work = parse(found["feed"]).work
    assert work["collate"].a_token and work["collate"].seconds == pytest.approx(found["collate_s"], rel=1e-3)
    assert found["tokens"] > 10_000 and 0.9 < found["text_bytes"] <= 1  # a byte a token, and the ends
    assert main(["calibrate", "--train", "batch=4,seq=64"]) == 2 and "K001" in codes(capsys.readouterr().err)
