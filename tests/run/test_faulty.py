"""Replicas that bring something else than their gradients: sums by hand, and worlds that say so."""

import json

import msgspec
import pytest
import torch

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.run.faulty import spoil
from meshwright.world.faulty import FaultyWorkers
from meshwright.world.trace import read
from tests.run.classifiers import FEATURES, SOFTMAX, begun, model, state, steps
from tests.run.processes import launch_kept

TRAIN = msgspec.structs.replace(FEATURES, optimizer="sgd", global_batch=12)
TIMES = 4.0


def moved(rank, faults, count=1):
    """How far plain steps move the parameters of a rank of three [values], for each of some faults."""
    found = []
    for fault in faults:
        trainer = begun(model(SOFTMAX), "dp3 mb4", TRAIN, weight_decay=0.0)
        if fault is not None:
            spoil(trainer, fault)
        ends = []
        for first in range(count + 1):
            steps(trainer, max(0, first - 1), first)
            ends.append(torch.cat([values.flatten() for *_, values in state(trainer)]))
        found.append(ends[-1] - ends[0])
    return found


def test_sums_have_what_faulty_replicas_bring():
    """Sound steps are the sum of three gradients; with one that brings nothing, of two; the rest follows."""
    ways = [FaultyWorkers(count=1, sends=way, times=TIMES) for way in ("nothing", "reversed", "noise")]
    other = msgspec.structs.replace(ways[2], seed=1)
    every = launch_kept(3, moved, [None, *ways, ways[2], other])
    for sound, without, turned, noisy, again, another in every:
        own = sound - without
        assert float(own.norm()) > 1e-3
        assert torch.allclose(turned, without - TIMES * own, atol=1e-12)
        assert float((noisy - without).norm()) == pytest.approx(TIMES * float(own.norm()), rel=1e-9)
        assert (noisy == again).all() and (noisy != another).any()
    assert all((one == other).all() for rank in every[1:] for one, other in zip(every[0], rank))


def test_noise_is_another_in_every_step():
    noise = FaultyWorkers(count=1, times=TIMES)
    (one,), (two,) = (launch_kept(3, moved, [noise], count)[0] for count in (1, 2))
    assert abs(float(torch.nn.functional.cosine_similarity(one, two - one, 0))) < 0.5


def test_words_of_a_world_say_who_is_faulty():
    assert read("faulty=2").faulty == FaultyWorkers(count=2)
    said = read("faulty=3:reversed:2.5,seed=7")
    assert said.faulty == FaultyWorkers(count=3, sends="reversed", times=2.5, seed=7) and not said.of_job
    for wrong in ("faulty=", "faulty=-1", "faulty=2:loud", "faulty=2:noise:0", "faulty=1,faulty=1", "faulty=2:3"):
        with pytest.raises(MeshwrightError, match=r"O001.*faulty"):
            read(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --plan dp2_mb8_sync=local:h=2 --world faulty=1", "bring no gradients in every step"),
        ("run --plan dp2_mb8_sync=fedavg:h=2 --world faulty=1", "bring no gradients in every step"),
        ("run --plan dp2_mb8 --world faulty=2", "the plan has 2 replicas, and some must be sound"),
        ("run --plan dp2_mb8 --world faulty=1,skew=0.3", "faulty workers stand alone"),
        ("run --plan dp2_mb8 --world faulty=1 --elastic", "faulty workers stand alone"),
        ("predict --plan dp2_mb8 --world faulty=1", "leave it out of a prediction"),
    ],
)
def test_faulty_workers_where_there_cannot_be_any_are_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = [word.replace("_", " ") for word in words.split()]
    asked += ["digits-softmax", "--on", "2xh100", "--train", "batch=16,features=64,optimizer=sgd"]
    asked += ["--data", "digits", "--device", "cpu"] if asked[0] == "run" else []
    assert main(asked) == 2
    assert said in capsys.readouterr().err


def test_a_run_with_a_faulty_worker_says_what_became_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ["run", "digits-softmax", "--on", "3xh100", "--train", "batch=48,features=64,optimizer=sgd,dtype=fp32"]
    asked += ["--plan", "dp3 mb16 sync=step:combine=median", "--data", "digits", "--device", "cpu", "--lr", "0.1"]
    out = tmp_path / "out"
    assert main([*asked, "--steps", "30", "--eval-every", "30", "--world", "faulty=1", "--out", str(out)]) == 0
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_accuracy"] > 0.5  # a guess is 0.1
