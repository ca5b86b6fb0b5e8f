"""A real run that is killed as a world's trace says goes on as the simulated job's decider says."""

import json

import pytest

from meshwright.cli import main
from meshwright.plan import parse
from meshwright.run import data, loop
from meshwright.run.data import tokenizer
from meshwright.run.recover import recovered, saved_steps
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.decider import replayed
from meshwright.world.recovery import Ended, Failed, Recovery, Wait
from meshwright.world.trace import WorldEvent

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_the_decider_says(tmp_path):
    corpus = str(data.build("sample", tokenizer.Bytes(), tmp_path / "corpus"))
    out = tmp_path / "out"
    job = loop.Job(
        model=MODEL,
        plan=parse("dp2 zero1"),
        train=Train(global_batch=4, seq_len=32, dtype="fp32"),
        corpus=corpus,
        steps=200,
        out=str(out),
        quiet=True,
    )
    # one process of the first start dies at once, whatever the machine; the second death waits for a repair
    decider = Recovery(save_every=20, spares=1)
    found = recovered(job, decider, [WorldEvent(0.0), WorldEvent(0.5)], repair_s=1.0, device="cpu")
    events = [entry.event for entry in found.log]
    assert found.failures == 2 and sum(isinstance(e, Failed) for e in events) == 2
    assert isinstance(events[-1], Ended)
    assert any(isinstance(d, Wait) for entry in found.log for d in entry.decisions)
    assert replayed(decider, found.log) == list(found.log)
    assert found.summary["last_step"] == 200
    said = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert said == list(range(1, 201))  # every step once, however often it was done
    assert found.seconds > 0 and found.simulated_s > 0


@pytest.mark.parametrize(
    ("world", "more", "told"),
    [
        ("mtbf=3h", ["--out", "x", "--save-every", "5"], "killed at the times of a trace"),
        ("w.csv", [], "needs checkpoints"),
        ("slow.csv", ["--out", "x", "--save-every", "5"], "cannot be slowed"),
        ("bad.csv", ["--out", "x", "--save-every", "5"], "O002"),
    ],
)
def test_a_world_that_a_run_cannot_meet_is_refused(world, more, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text("1,fail\n")
    (tmp_path / "slow.csv").write_text("1,slow 2\n")
    (tmp_path / "bad.csv").write_text("1,explode\n")
    asked = ["run", "--model", "llama3-8b", "--on", "2xh100", "--train", "batch=2,seq=16", "--plan", "dp2"]
    assert main([*asked, "--data", "sample", "--world", world, *more]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_run_goes_on_from_its_newest_complete_checkpoint_whatever_generation_that_is(tmp_path):
    assert saved_steps(str(tmp_path / "none")) == saved_steps(str(tmp_path)) == 0
    for name, whole in (("step-00000020", True), ("step-00000020-1", True), ("step-00000040", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "index.json").write_text("{}")
    assert saved_steps(str(tmp_path)) == 20
