"""`meshwright converge` as a user meets it: policies at equal tokens, added to, ended in order, clear refusals."""

import csv
import json
import re
import signal
import time
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.data import documents
from meshwright.spec.model import load
from tests.cli.tiny import tiny
from tests.run.forked import Program

WORDS = ["converge", "tiny/config.json", "--data", "sample", "--train", "batch=4,seq=32,dtype=fp32", "--replicas", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny(tmp_path)


def rows():
    return list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))


def test_policies_are_trained_at_equal_tokens_and_a_study_is_added_to(capfd):
    asked = [*WORDS, "--steps", "2", "--out", "out"]
    assert main([*asked, "--sync", "step local:h=2", "--seeds", "2"]) == 0
    shown = capfd.readouterr()
    assert "4/4  local:h=2, 2 steps, seed 1: held-out loss" in shown.err
    first = {(r["policy"], r["seed"]): r for r in rows()}
    assert first.keys() == {(policy, seed) for policy in ("step", "local:h=2") for seed in "01"}
    assert {r["tokens"] for r in first.values()} == {"256.0"}  # 2 steps of 4 sequences of 32
    # a ring of two sends a sum's bytes once; a replica trains 64 tokens a step, and local steps average once in two
    sent = 4 * load("tiny/config.json").num_params / 64
    assert float(first["step", "0"]["sent_per_token"]) == pytest.approx(sent)
    assert float(first["local:h=2", "0"]["sent_per_token"]) == pytest.approx(sent / 2)
    files = sorted(Path("out").glob("runs/*/result.json"))
    written = {f: f.stat().st_mtime_ns for f in files}
    more = ["--sync", "dist-lion@3e-4 fedavg:h=1", "--feedback", "dfa:micro@1e-2"]
    assert main([*asked, *more, "--seeds", "1", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["policies"]
    (served,) = (float(r["sent_per_token"]) for r in rows() if r["policy"] == "fedavg:h=1")
    assert served == pytest.approx(2 * sent)  # the model, and what changed in it
    assert {f: f.stat().st_mtime_ns for f in files} == written
    assert [one["policy"] for one in sorted(found, key=lambda one: one["policy"])] == [
        "dist-lion@3e-4",
        "fedavg:h=1",
        "feedback=dfa:micro@1e-2",
        "local:h=2",
        "step",
    ]
    table = Path("out/table.md").read_text()
    assert re.search(r"^\| `dist-lion@3e-4` \| \d\.\d{4} \| 0\.0000 \| [+-]\d\.\d{4} ± 0\.0000 \|", table, re.MULTILINE)
    assert not list(Path("out").glob("runs/*/step-*"))


def test_a_study_that_is_interrupted_leaves_its_results_and_goes_on(capfd):
    asked = [*WORDS, "--sync", "step", "--steps", "24", "--seeds", "3", "--out", "out"]
    environment = {"XDG_CACHE_HOME": Path("cache").resolve()}

    def program():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background ignores it
        return main(asked)

    running = Program(program, environment)
    until = time.monotonic() + 60
    while not Path("out/results.csv").is_file() and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(60)
    assert running.returncode == 0, err
    assert "ended on request: the same command goes on" in err
    before = rows()
    assert 1 <= len(before) < 3
    assert main(asked) == 0
    assert rows()[: len(before)] == before and len(rows()) == 3


def test_everything_that_is_wrong_is_said_at_once(capfd):
    asked = ["converge", "--sync", "local int9", "--steps", "x", "--replicas", "1", "--device", "tpu"]
    assert main(asked) == 2
    err = capfd.readouterr().err
    for said in ("--data TEXT", "--out FOLDER", "local does not say h", "'int9'", "--steps x", "--replicas 1", "tpu"):
        assert said in err, said


@pytest.mark.parametrize(
    ["words", "said"],
    [
        (["--sync", "local:h=3", "--steps", "4"], "take a multiple of 3"),
        (["--sync", "int8@fast", "--steps", "4"], "behind the @ is a learning rate"),
        (["--sync", "step", "--train", "batch=3,seq=32,dtype=fp32"], "2 replicas share it"),
        (["--sync", "step", "--train", "batch=128,seq=32,dtype=fp32"], "do not fill a batch of 128 sequences of 32"),
        (["--data", "package:no_such_package"], "pip install no_such_package"),
    ],
)
def test_a_study_that_cannot_be_is_refused_with_its_fix(capfd, words, said):
    base = list(WORDS) if "--train" not in words else [*WORDS[:4], *WORDS[6:]]
    base = base if "--data" not in words else [*base[:2], *base[4:]]
    assert main([*base, *words, "--out", "out"]) == 2
    assert said in capfd.readouterr().err


SAMPLES = ["converge", "digits-softmax", "--data", "digits", "--replicas", "3", "--seeds", "2", "--lr", "0.05"]
SAMPLES += ["--train", "batch=48,features=64,optimizer=momentum,dtype=fp32", "--out", "out"]


def test_classifiers_are_compared_at_equal_samples_by_held_out_accuracy_too(capfd):
    asked = [
        *SAMPLES,
        "--steps",
        "20",
        "--sync",
        "step fedavg:h=4",
        "--workload",
        "batch=96@0.1",
        "--world",
        "skew=0.2",
    ]
    assert main([*asked, "--json"]) == 0
    found = {one["policy"]: one for one in json.loads(capfd.readouterr().out)["policies"]}
    assert found.keys() == {"step", "fedavg:h=4", "train=batch=96@0.1"}
    runs = rows()
    assert {r["tokens"] for r in runs} == {"960.0"}  # 20 steps of 48, or 10 of 96
    shares = {one: [float(r["accuracy"]) for r in runs if r["policy"] == one] for one in found}
    assert all(len(some) == 2 and round(360 * x, 6).is_integer() for some in shares.values() for x in some)
    assert all(found[one]["right"] == pytest.approx(sum(some) / 2) for one, some in shares.items())
    assert found["step"]["right"] > 0.5 and found["step"]["right_apart"] == 0  # a guess is 0.1
    # uneven clients are behind: each has few classes
    assert found["fedavg:h=4"]["right_apart"] < -0.05
    assert main(asked) == 0
    table = Path("out/table.md").read_text()
    assert "After 20 steps, 960 samples:" in table and "bytes a sample" in table
    assert re.search(r"^\| `step` \| \d\d\.\d\d% \| \d+\.\d\d \|  \| \d\.\d{4} \|", table, re.MULTILINE)
    assert re.search(r"\| `fedavg:h=4` \| [\d.]+% \| [\d.]+ \| -[\d.]+ ± [\d.]+ \| .* worse \|", table)


def test_faulty_workers_harm_a_mean_and_not_a_median(capfd):
    policies = ["--sync", "step:combine=median", "--world", "faulty=1:reversed:10"]
    assert main([*SAMPLES, "--steps", "20", *policies, "--json"]) == 0
    found = {one["policy"]: one["right"] for one in json.loads(capfd.readouterr().out)["policies"]}
    assert found["step"] < 0.2 < 0.5 < found["step:combine=median"]


@pytest.mark.parametrize(
    ["words", "said"],
    [
        (["--world", "skew=0.3"], "no policy here is of clients"),
        (["--world", "mtbf=3h"], "a study knows how clients differ"),
        (["--world", "faulty=3"], "the plan has 3 replicas, and some must be sound"),
        (["--world", "faulty=1", "--sync", "local:h=2"], "bring no gradients in every step"),
        (["--world", "faulty=0"], "faulty='0' is not a number of replicas"),
        (["--feedback", "dfa"], "digits-softmax learns by gradients"),
        (["--workload", "batch=64"], "3 replicas share a batch"),
        (["--workload", "batch=96", "--steps", "3"], "are no whole number of steps of 96"),
        (["--workload", "batch=96@fast"], "--workload batch=96@fast"),
        (["--workload", "pace=3"], "pace"),
    ],
)
def test_a_study_of_samples_that_cannot_be_is_refused_with_its_fix(capfd, words, said):
    steps = [] if "--steps" in words else ["--steps", "4"]
    assert main([*SAMPLES, *steps, *words]) == 2
    assert said in capfd.readouterr().err


def test_the_folder_of_another_study_is_refused(capfd):
    asked = [*WORDS, "--sync", "step", "--steps", "1", "--seeds", "1", "--out", "out"]
    assert main(asked) == 0
    assert main([*asked, "--lr", "1e-4"]) == 2
    assert "lr is 0.003, not 0.0001" in capfd.readouterr().err


def test_the_text_of_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "speeches"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "one.txt").write_text("four score")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert documents.files("package:speeches") == [documents.TextFile(package / "one.txt")]
