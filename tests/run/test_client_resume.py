"""Runs of clients that are killed and go on: the versions that follow are those of a run that nobody disturbed."""

import json
import os
import signal
import socket
import time

import pytest
import torch

from meshwright.cli import main
from meshwright.plan import parse
from meshwright.run import clients, data, loop
from meshwright.run.checkpoint.format import complete
from meshwright.run.client import ClientLoop
from meshwright.run.data import tokenizer
from meshwright.run.settings import Settings
from meshwright.run.world import World
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.crowd import Crowd, factors
from tests.run.processes import launch as forked
from tests.run.processes import start_kept

MODEL = transformer(layers=1, hidden=16, heads=2, kv_heads=2, vocab=260, ffn=24, gated=True, max_seq_len=32)
SETTINGS = Settings(precision="float64", lr=1e-2, warmup=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def job(corpus, words, steps, out, **said):
    train = Train(global_batch=3, seq_len=16, dtype="fp32", optimizer="sgd" if "sgd" in said else "adamw")
    said.pop("sgd", None)
    return loop.Job(
        model=MODEL,
        plan=parse(f"dp3 mb1 sync={words}"),
        train=train,
        settings=SETTINGS,
        corpus=corpus,
        steps=steps,
        quiet=True,
        out=str(out),
        **said,
    )


def run(asked, crowd):
    return start_kept(clients.train, asked, crowd, num_ranks=3)


def killed(rank, asked, crowd, victim):
    """A rank of a run in which a client dies at the beginning of a task once there is a checkpoint, for which all take
    some time."""
    begin = ClientLoop._steps

    def steps(self, said, losses):
        time.sleep(0.05)
        if rank == victim and complete(self.saver.root):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, said, losses)

    ClientLoop._steps = steps
    place = World(rank, 3, rank, 3, socket.gethostname(), torch.device("cpu"))
    return clients.train(place, asked, crowd)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ["words", "said", "crowd"],
    [
        # a pull, what a code lost, and one that rests with moments of its own
        ("fedprox:h=2,clients=2,codec=topk,share=0.1", {}, Crowd(skew=0.5, drop=0.2, seed=3)),
        ("fedamd:h=2,period=2", {"sgd": True}, Crowd()),  # kept gradients and directions
        ("feddip:h=2,rounds=8,every=2", {}, Crowd()),  # masks
        ("mas:h=1,tasks=3,rounds=4,turn=2,clients=2", {}, Crowd()),  # affinities, and models of several jobs
        ("coded:s=1", {"sgd": True}, Crowd(drop=0.2, seed=2)),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(corpus, tmp_path, words, said, crowd):
    """One client is killed with a signal that it cannot catch. The losses of all versions are those of the run that
    went through, in float64: to the last bit, but for the coded sum, which is of whoever answers first."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(job(corpus, words, 12, one, **said), crowd)
    with pytest.raises(AssertionError):
        forked(3, killed, job(corpus, words, 12, other, save_every=2, **said), crowd, 1)
    assert 0 < len(lines(other)) < len(lines(one))
    found = run(job(corpus, words, 12, other, resume=True, **said), crowd)
    expected, got = lines(one), lines(other)
    assert [(v["step"], v["steps"]) for v in got] == [(v["step"], v["steps"]) for v in expected]
    assert [v["loss"] for v in got] == pytest.approx(
        [v["loss"] for v in expected], rel=1e-12 * ("coded" in words), abs=0
    )
    assert found["first_step"] > 1 and found["last_step"] == len(expected)
    assert found["first_step"] + len(found["losses"]) - 1 == len(expected)


@pytest.mark.parametrize(
    "words", ["fedbuff:h=2,buffer=2,codec=int8", "favano:h=4,clients=2,every=60ms", "fedavg:h=1,tree=3"]
)
def test_a_run_that_has_ended_goes_on_to_more_steps(corpus, tmp_path, words):
    """Clients that answer when they like, and aggregators between: versions follow one another, and the steps of both
    runs make the whole."""
    first = run(job(corpus, words, 6, tmp_path), Crowd(speeds=factors("1/1/2")))
    then = run(job(corpus, words, 12, tmp_path, resume=True), Crowd(speeds=factors("1/1/2")))
    assert then["first_step"] == first["last_step"] + 1
    assert [v["step"] for v in lines(tmp_path)] == list(range(1, then["last_step"] + 1))
    assert 36 <= first["clients"]["merged"] + then["clients"]["merged"] == sum(v["steps"] for v in lines(tmp_path))
    assert then["losses"][-1] < first["losses"][0]


def test_a_command_refuses_other_clients_and_says_what_fits(tmp_path, capsys):
    """The checkpoint of a run of clients is for as many of them again, and its model for plans without."""
    config = tmp_path / "config.json"
    small = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 257, "max_position_embeddings": 32}
    config.write_text(json.dumps(small | {"tie_word_embeddings": True}))
    argv = ["run", str(config), "--on", "2x1xh100,1gbe", "--train", "batch=2,seq=16,dtype=fp32", "--device", "cpu"]
    argv += ["--data", "sample", "--out", str(tmp_path / "out"), "--json"]
    assert main([*argv, "--plan", "dp2 mb1 sync=fedavg:h=2", "--steps", "4", "--save-every", "2"]) == 0
    assert sorted(f.name for f in (tmp_path / "out").glob("step-*"))[-1] == "step-00000004"
    capsys.readouterr()
    assert main([*argv, "--plan", "dp2 mb1 sync=fedbuff:h=2", "--steps", "8", "--resume"]) == 2
    said = capsys.readouterr().out
    assert "Y004" in said and "2 clients under sync=fedavg:h=2" in said and "--resume" in said
    assert main([*argv, "--plan", "dp2 mb1 sync=fedavg:h=2", "--steps", "8", "--resume"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_step"] == 3 and found["clients"]["merged"] == 8
    assert main([*argv, "--plan", "dp2 mb1 sync=fedavg:h=2", "--steps", "8", "--resume"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["losses"] == [] and again["saved"] == found["saved"]  # it is done
    assert main([*argv, "--plan", "dp2 mb1", "--steps", "9", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["first_step"] == 9
    assert main([*argv, "--plan", "dp2 mb1 sync=fedavg:h=2", "--steps", "12", "--resume"]) == 2
    assert "no clients" in capsys.readouterr().out
