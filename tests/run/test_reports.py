"""Every step is told to whoever asked: a function of the user's own, TensorBoard's files, and a project of wandb."""

import json
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data, launch, loop, reports
from meshwright.run.data import tokenizer
from meshwright.run.reports import StepReport, callback, missing
from meshwright.run.settings import Settings
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=1, hidden=32, heads=2, vocab=257, ffn=32, gated=True, max_seq_len=16)
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(corpus, on_step=None, **said):
    how = {"settings": Settings(lr=1e-2), "steps": 6, "quiet": True, "plan": parse("dp1")} | said
    job = loop.Job(model=MODEL, train=TRAIN, corpus=corpus, **how)
    return launch.start(loop.train, job, on_step, num_ranks=job.plan.num_ranks, device="cpu", stops=True)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_function_sees_every_step_as_metrics_has_it_and_ends_the_run_in_order(corpus, tmp_path):
    def told(report: StepReport):
        with (tmp_path / "told").open("a") as file:
            file.write(json.dumps({"loss": report.loss, **report.values, "of": report.steps}) + "\n")
        return report.step == 3

    summary = run(corpus, told, plan=parse("dp2"), out=str(tmp_path / "out"), steps=50)
    assert summary["stopped"] and summary["last_step"] == 4  # all ranks do the step after, and save
    seen = lines(tmp_path / "told")
    assert [{k: v for k, v in one.items() if k != "of"} for one in seen] == lines(tmp_path / "out" / "metrics.jsonl")
    assert {one["of"] for one in seen} == {50} and (tmp_path / "out" / "step-00000004").is_dir()


def test_a_function_that_fails_ends_the_run_with_what_was_trained_saved_and_says_where(corpus, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def step(report):\n    if report.step == 2:\n        raise ValueError('no more')\n"
    )
    with pytest.raises(MeshwrightError) as caught:
        run(corpus, callback="mine:step", out="out", plan=parse("dp2"))
    (found,) = caught.value.diagnostics
    assert (found.code, caught.value.exit_code) == ("L008", 1)
    assert found.message == "the callback failed after step 2: ValueError: no more"
    assert found.place.endswith("mine.py:3")
    assert (tmp_path / "out" / "step-00000003").is_dir()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "is not MODULE:FUNCTION"),
        ("../mine:step", "is not MODULE:FUNCTION"),
        ("absent_module:step", "No module named"),
        ("broken:step", "ZeroDivisionError"),
        ("broken_not:step", "has no attribute 'step'"),
        ("broken_not:value", "is no function"),
        ("broken_not:later", "later of broken_not is asynchronous"),
        ("leaves:step", "SystemExit: 5"),
    ],
)
def test_a_function_that_is_not_there_is_one_error(name, said, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "broken_not.py").write_text("value = 3\nasync def later(report): pass\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(MeshwrightError, match="L008") as caught:
        callback(name)
    assert said in caught.value.diagnostics[0].message


def test_tensorboard_reads_the_numbers_of_every_step_once_also_after_going_on(corpus, tmp_path):
    said = {"out": str(tmp_path / "out"), "tensorboard": str(tmp_path / "board")}
    run(corpus, steps=3, **said)
    run(corpus, steps=5, resume=True, **said)
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    expected = lines(tmp_path / "out" / "metrics.jsonl")
    assert {"train/loss", "train/grad_norm", "train/lr", "train/tokens_per_s"} <= set(found.Tags()["scalars"])
    loss = found.Scalars("train/loss")
    assert [one.step for one in loss] == [1, 2, 3, 4, 5]
    assert [one.value for one in loss] == pytest.approx([line["loss"] for line in expected], rel=1e-6)


def test_wandb_is_given_the_numbers_of_every_step_and_what_is_trained(corpus, tmp_path, monkeypatch):
    """By a module of its name that writes down its calls; the package itself is not needed to be installed."""
    calls = tmp_path / "calls"

    class Run:
        def log(self, values, step):
            with calls.open("a") as file:
                file.write(json.dumps({"step": step} | values) + "\n")

        def finish(self):
            with calls.open("a") as file:
                file.write('{"finished": true}\n')

    def init(**said):
        calls.write_text(json.dumps(said) + "\n")
        return Run()

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(corpus, steps=2, wandb="tuning", out=str(tmp_path / "out"))
    begun, *steps, last = lines(calls)
    assert begun["project"] == "tuning" and begun["config"]["plan"] == "dp1 mb1" and begun["config"]["lr"] == 1e-2
    expected = lines(tmp_path / "out" / "metrics.jsonl")
    assert [one["step"] for one in steps] == [1, 2] and last == {"finished": True}
    assert [one["loss"] for one in steps] == [line["loss"] for line in expected]


def test_a_package_that_is_not_installed_is_named_with_what_has_the_same_numbers(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = missing("board", "project")
    assert [(d.code, d.place) for d in found] == [("L003", "--tensorboard board"), ("L003", "--wandb project")]
    assert all("pip install" in d.help and "metrics.jsonl" in d.help for d in found)


def test_a_report_that_cannot_begin_is_one_error_on_all_ranks(corpus, monkeypatch):
    def refuse(*given):
        raise RuntimeError("no key")

    monkeypatch.setattr(reports, "WandbRun", refuse)
    with pytest.raises(MeshwrightError, match=r"L008.*RuntimeError: no key"):
        run(corpus, wandb="tuning", plan=parse("dp2"))


def test_a_folder_of_tensorboard_that_cannot_be_made_says_which_and_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    job = loop.Job(model=MODEL, train=TRAIN, plan=parse("dp1"), tensorboard=str(tmp_path / "file" / "board"))
    with pytest.raises(MeshwrightError) as caught:
        reports.reporters(job, 0)
    (found,) = caught.value.diagnostics
    assert found.code == "X104" and "board: Not a directory" in found.message and "has room" in found.help


def test_python_trains_a_plan_and_hears_of_every_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    where, heard = mw.load_cluster("1xh100"), tmp_path / "heard"
    with pytest.raises(MeshwrightError, match="P0"):
        mw.train(MODEL, where, TRAIN, mw.parse_plan("tp3"))

    def told(report):
        with heard.open("a") as file:
            file.write(f"{report.step} ")

    found = mw.train(MODEL, where, TRAIN, mw.parse_plan("dp1"), steps=3, quiet=True, device="cpu", on_step=told)
    assert heard.read_text() == "1 2 3 " and len(found.losses) == 3
