"""Clients of a server as real processes: what they learn, the bytes they send, and the same world simulated."""

import json
import socket
from unittest.mock import patch

import msgspec
import pytest
import torch

from meshwright.cli import main
from meshwright.plan import parse
from meshwright.run import clients, data, loop
from meshwright.run.data import tokenizer
from meshwright.run.settings import Settings
from meshwright.run.world import World
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.sync.clients import Answered, Begun, ClientDecision, ClientEvent
from meshwright.sync.policy import read
from meshwright.world.crowd import Crowd, factors
from meshwright.world.decider import LogEntry, replayed
from tests.run import local
from tests.run.processes import launch_kept, start_kept
from tests.run.small import differences

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)
TRAIN = Train(global_batch=6, seq_len=32, dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def job(corpus, plan, steps, **said):
    settings = Settings(**{"lr": 1e-2} | said.pop("settings", {}))
    return loop.Job(
        model=MODEL, plan=parse(plan), train=TRAIN, settings=settings, corpus=corpus, steps=steps, quiet=True, **said
    )


def run(asked, world):
    return start_kept(clients.train, asked, world, num_ranks=asked.plan.layout.dp)


def held(rank, asked, kind):
    """The parameters that a rank holds at the end: of a run of clients, or of any other."""
    found = []
    size = asked.plan.layout.dp
    place = World(rank, size, rank, size, socket.gethostname(), torch.device("cpu"))
    keep = lambda job, trainer, *_: found.append(local.state(trainer)) or ""  # noqa: E731
    if kind == "clients":
        finished = clients._finished
        with patch.object(clients, "_finished", lambda *said: (finished(*said), keep(*said))[0]):
            clients.train(place, asked, Crowd())
    else:
        with patch.object(loop.RankRun, "_save", lambda self, **_: keep(self.job, self.trainer)):
            loop.train(place, asked)
    return found[-1]


def test_a_sample_of_all_clients_is_local_steps_with_a_mean(corpus):
    """FedAvg over all clients and local SGD (another mechanism: an all-reduce of parameters) hold the same after three
    rounds, in float64 but for the order of three additions; every rank has the server's model."""
    plans = {"clients": "dp3 mb2 sync=fedavg:h=2", "replicas": "dp3 mb2 sync=local:h=2"}
    got = {
        kind: launch_kept(3, held, job(corpus, plan, 6, settings={"precision": "float64"}), kind)
        for kind, plan in plans.items()
    }
    (one, other), whole = got.values(), lambda rank: local.whole([rank], "param")
    assert max(differences(whole(one[0]), whole(other[0])).values()) < 1e-12
    assert max(differences(whole(one[0]), whole(one[2])).values()) == 0


def test_aggregators_change_nothing_but_the_way(corpus):
    """Four clients, sampled by three, in two groups: with an aggregator each, the server holds the same, in float64 but
    for the order of additions."""
    train = Train(global_batch=8, seq_len=32, dtype="fp32")
    words, settings = "dp4 mb2 sync=fedavg:h=1,clients=3", {"precision": "float64"}
    got = [
        launch_kept(4, held, msgspec.structs.replace(job(corpus, plan, 3, settings=settings), train=train), "clients")
        for plan in (words, f"{words},tree=2")
    ]
    one, other = (local.whole([ranks[0]], "param") for ranks in got)
    assert max(differences(one, other).values()) < 1e-12


@pytest.mark.parametrize(
    ["words", "codec_bytes"],
    [("fedbuff:h=2,buffer=2,codec=int8", 1.02), ("favano:h=6,clients=2,every=250ms", 4.0), ("backup:b=1", 4.0)],
)
def test_unlike_clients_learn_and_send_the_bytes_that_are_predicted(corpus, words, codec_bytes):
    """The loss of the last versions is well below that of a model that knows nothing (log 260 = 5.56). A round of
    FAVANO's is long enough that six steps fit on a slow machine too: how far it gets is no matter of speed."""
    world = Crowd(speeds=factors("1/1/3"), skew=0.5)
    asked = job(corpus, f"dp3 mb2 sync={words}", 40)
    found = run(asked, world)
    did, losses = found["clients"], found["losses"]
    assert losses[0] > 4.4 and sum(losses[-3:]) / 3 < 3.9
    assert did["merged"] >= 120 and len(did["versions"]) == len(losses) and sum(did["steps"]) >= did["merged"]
    answers = sum(entry["event"]["type"] == "Answered" for entry in did["log"])
    from meshwright.answer.predict import predict

    predicted = predict(MODEL, load("3x1xh100,10gbe"), TRAIN, asked.plan, detail=False).clients
    each = predicted.up_bytes / sum(isinstance(e.event, Answered) for e in predicted.log)
    sent, rest = divmod(did["up_bytes"], each)  # some of what is sent is of no use any more
    assert rest == 0 and (sent == answers if "fedbuff" in words else sent >= answers)
    assert each == pytest.approx(codec_bytes * MODEL.num_params, rel=0.05)


def test_the_log_of_a_real_run_replays(corpus):
    """The decider of the simulation, told the events of real processes again, decides the same."""
    found = run(job(corpus, "dp3 mb2 sync=fedcompass:h=8,least=2", 12), Crowd(drop=0.2, seed=1))
    log = [LogEntry(*msgspec.structs.astuple(one)) for one in msgspec.convert(found["clients"]["log"], list[Entry])]
    one = read("fedcompass:h=8,least=2")
    assert isinstance(log[0].event, Begun) and found["clients"]["left"] > 0
    assert replayed(one.rule.decider(one.values, 3), log) == log


class Entry(LogEntry):
    """An entry of a log of clients, to be read."""

    event: ClientEvent
    decisions: tuple[ClientDecision, ...]


def test_the_proximal_term_keeps_clients_near_the_model(corpus):
    """With a strong pull what clients change in a task is less, and no loss is not a number."""
    moved, still = [], job(corpus, "dp3 mb2 sync=fedprox:h=6", 6, settings={"lr": 1e-30})
    before = launch_kept(3, held, still, "clients")
    for mu in (0.001, 30.0):
        got = launch_kept(3, held, job(corpus, f"dp3 mb2 sync=fedprox:h=6,mu={mu}", 6), "clients")
        moved.append(max(differences(*(local.whole([one[0]], "param") for one in (got, before))).values()))
    assert moved[1] < 0.8 * moved[0]


def test_a_command_trains_clients_and_says_what_a_simulation_does(tmp_path, capsys):
    config = tmp_path / "config.json"
    small = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 257, "max_position_embeddings": 32}
    config.write_text(json.dumps(small | {"tie_word_embeddings": True}))
    argv = [str(config), "--on", "2x1xh100,1gbe", "--train", "batch=2,seq=16,dtype=fp32"]
    argv += ["--plan", "dp2 mb1 sync=fedavg:h=2", "--world", "speeds=1/2"]
    out = ["--out", str(tmp_path / "out")]
    assert main(["run", *argv, "--data", "sample", "--device", "cpu", "--steps", "4", *out, "--json"]) == 0
    assert (tmp_path / "out" / "step-00000004").is_dir()
    found = json.loads(capsys.readouterr().out)["clients"]
    assert [v["answers"] for v in found["versions"]] == [2, 2] and found["simulated_s"] > 0
    assert main(["predict", *argv, "--json"]) == 0
    rounds = json.loads(capsys.readouterr().out)["clients"]
    assert rounds["busy"] < 0.9 and rounds["wasted"] == 0
    assert main(["emulate", *argv[:-2]]) == 2 and "clients of a server" in capsys.readouterr().err
    assert main(["predict", *argv[:-3], "dp2 mb1", "--world", "speeds=1/2"]) == 2
    assert "O005" in capsys.readouterr().err
