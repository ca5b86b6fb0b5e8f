"""Classifiers under the policies of exchanges that text is trained with: the bytes that are predicted, and what they
hold."""

import socket
from collections import Counter
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from meshwright.answer.predict import predict, simulate
from meshwright.cost import standard
from meshwright.papers.checks.federated import RegressionClients, rounds_of
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run import clients, data, loop
from meshwright.run.checkpoint import Meta, identity, save
from meshwright.run.checkpoint import load as load_checkpoint
from meshwright.run.data import tokenizer
from meshwright.run.settings import Settings
from meshwright.run.world import World
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.clients import Answered
from meshwright.sync.codecs import codec
from meshwright.sync.policy import read as policy
from meshwright.world.crowd import Crowd, factors
from tests.run import codes, local
from tests.run.classifiers import FEATURES, PERCEPTRON, SOFTMAX, TRAIN, VGG, begun, model, steps
from tests.run.processes import launch_kept, start_kept
from tests.run.small import differences

OF = {"vgg": (VGG, TRAIN), "perceptron": (PERCEPTRON, FEATURES)}


def moved(text, config, train, chosen):
    """The (operation, bytes) of a step's simulated moves that are `chosen` by their program."""
    where = parse(text)
    run = simulate(where, model(config), load(f"{where.layout.num_ranks}xh100"), train, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    keys = [int(graph.cost_key[task]) for task in range(graph.num_tasks)]
    return [(move.op, move.num_bytes) for key in keys if chosen(programs[key]) for move in programs[key].moves]


@pytest.mark.parametrize("family", OF)
@pytest.mark.parametrize("words", ["step", "int8", "terngrad", "topk:share=0.1", "powersgd:rank=2"])
def test_gradients_take_the_bytes_that_are_predicted(family, words):
    config, train = OF[family]
    text = f"dp2 mb4 sync={words}"
    got = launch_kept(2, codes.trained, model(config), text, train, 1, local.FP32)
    told = moved(text, config, train, lambda program: program.kind == "exchange")
    summed = codec(policy(words).codec).summed
    told = [one for one in told if one != ("all_reduce", 4) and (one[0] != "all_gather" or not summed)]
    for _, _, sent in got:
        assert sent and sorted(sent) == sorted(told)
    assert max(differences(*(local.whole([held], "param") for _, held, _ in got)).values()) == 0


@pytest.mark.parametrize("family", OF)
@pytest.mark.parametrize("words", ["local:h=2", "local:h=2,codec=int8", "diloco:h=2", "savic:h=2"])
def test_rounds_take_the_bytes_that_are_predicted(family, words):
    config, train = OF[family]
    train = msgspec.structs.replace(train, optimizer="sgd")
    text = f"dp2 mb4 sync={words}"
    got = launch_kept(2, local.trained, model(config), text, train, 2, local.FP32)
    told = moved(text, config, train, lambda program: program.every == 2)
    for *_, sent, exchanged in got:
        assert sorted(sent) == sorted(told) and not exchanged
    assert max(differences(*(local.whole([held], "param") for _, _, held, *_ in got)).values()) < 1e-6


NEIGHBOURS = ["gossip", "gossip:variance=kept", "admm:h=2,rho=0.1", "masha:h=2,codec=randomk,share=0.1,feedback=no"]


OTHERS = ["dadao", "qsr:h=2,growth=0.2,rate=0.01,steps=100", "cold-fusion:h=2", "demo", "dist-lion"]
OPTIMIZERS = {"demo": "sgd", "dist-lion": "lion", "dadao": "sgd", "masha": "sgd"}


@pytest.mark.parametrize("family", OF)
@pytest.mark.parametrize("words", [*NEIGHBOURS, *OTHERS])
def test_replicas_learn_under_policies_of_all_kinds(family, words):
    """Each is legal, executable and takes four steps of which the last one's loss is a number."""
    config, train = OF[family]
    optimizer = OPTIMIZERS.get(words.partition(":")[0], "momentum")
    train = msgspec.structs.replace(train, optimizer=optimizer)
    where = parse(f"dp4 mb2 sync={words}")
    of = model(config)
    assert not (check(where, of, load("4xh100"), train) or unexecutable(where, of, train))
    got = launch_kept(4, local.trained, of, f"dp4 mb2 sync={words}", train, 4, local.FP32)
    assert all(np.isfinite(loss) for _, seen, *_ in got for loss, _ in seen)


CLIENTS = ["fedavg:h=2", "fedprox:h=2,mu=0.1", "fedbuff:h=2,buffer=2,codec=int8", "fedfix:h=2,every=100ms"]
CLIENTS += ["favano:h=4,clients=2,every=100ms", "fedamd:h=2", "feddip:h=2,rounds=8", "backup:b=1", "dbw:noise=8"]
BATCH = Train(global_batch=12, seq_len=1, features=12, optimizer="sgd", dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    labels = rng.integers(0, 5, 300)
    features = rng.normal(size=(5, 12))[labels] * 3 + rng.normal(size=(300, 12)) / 2
    np.savez(folder / "some.npz", features=features.astype(np.float32), labels=labels)
    return str(data.build(str(folder / "some.npz"), tokenizer.Bytes(), folder / "cache"))


def of_clients(corpus, words, steps, **said):
    settings = Settings(**{"lr": 0.1, "clip": 0.0, "weight_decay": 0.0} | said.pop("settings", {}))
    plan = parse(f"dp3 mb4 sync={words}")
    return loop.Job(model=model(SOFTMAX), plan=plan, train=BATCH, settings=settings, corpus=corpus, steps=steps,
                    quiet=True, **said)  # fmt: skip


@pytest.mark.parametrize("words", CLIENTS)
def test_clients_learn_labels_and_send_the_bytes_that_are_predicted(corpus, words):
    asked = of_clients(corpus, words, 48, judged_every=1, held_out=0.2)
    world = Crowd(speeds=factors("1/1/2"), skew=0.3)
    found = start_kept(clients.train, asked, world, num_ranks=3)
    did = found["clients"]
    assert next(iter(found["judged"].values())) < 1.2  # of one that knows nothing it is log 5 = 1.61
    assert next(iter(found["accuracy"].values())) > 0.5  # and 0.2
    told = predict(asked.model, load("3x1xh100,10gbe"), BATCH, asked.plan, detail=False).clients
    answers = Counter(type(entry.event) for entry in told.log)[Answered]
    each = told.up_bytes / answers
    assert did["up_bytes"] > 0 and did["up_bytes"] % each == 0


def held_by(rank, text, train):
    """The state of a rank after four steps."""
    *_, held, _, _ = local.trained(rank, model(PERCEPTRON), text, train, 4, local.SETTINGS)
    return held


def test_rounds_of_one_step_of_plain_sgd_are_steps_together():
    train = msgspec.structs.replace(FEATURES, optimizer="sgd")
    one, other = (launch_kept(2, held_by, f"dp2 mb4{words}", train)[0] for words in ("", " sync=local:h=1"))
    assert max(differences(local.whole([one], "param"), local.whole([other], "param")).values()) < 1e-12
    assert all(torch.is_tensor(values) for *_, values in one)


def through_a_checkpoint(rank, text, root):
    """The statistics of a rank behind three steps, and those and the parameters behind four: of a run that went on,
    and of one that went on from what it had saved."""
    of, ended = model(VGG), []
    for again in (False, True):
        trainer = begun(of, text)
        if again:
            load_checkpoint(root, trainer.pieces(), trainer.mesh["world"], model_hash=identity(of))
            trainer.set_step(3)
        else:
            steps(trainer, 0, 3)
            judged = [norm.common.clone() for norm in trainer.statistics.norms]
            own = [norm.running.clone() for norm in trainer.statistics.norms]
            about = {"seed": 0, "model": "small", "model_hash": identity(of), "plan": text, "world": 2}
            save(root, trainer.pieces(), Meta(step=3, **about), trainer.mesh["world"])
        steps(trainer, 3, 4)
        ended.append([piece.values.detach().clone() for piece in trainer.pieces() if piece.key.startswith("param")])
    return judged, own, *ended


@pytest.mark.parametrize("words", ["local:h=2", "gossip"])
def test_replicas_that_differ_keep_and_save_statistics_of_their_own(words, tmp_path):
    (judged, own, went_on, again), (_, other, *both) = launch_kept(
        2, through_a_checkpoint, f"dp2 mb4 sync={words}", tmp_path
    )
    assert all((a == b).all() for a, b in zip(judged, own)) and any((a != b).any() for a, b in zip(own, other))
    for one, same in ((went_on, again), both):
        assert len(one) == len(same) and all((a == b).all() for a, b in zip(one, same))


def of_images(rank, asked):
    """The parameters and statistics of the first rank at the end of a run of clients, and what it says of them."""
    place, found = World(rank, 3, rank, 3, socket.gethostname(), torch.device("cpu")), []
    finished = clients._finished
    keep = lambda trainer: found.extend(  # noqa: E731
        (p.parameter.name, p.values.clone()) for p in trainer.pieces() if p.key == "param"
    )
    kept = lambda job, trainer, *rest: (finished(job, trainer, *rest), keep(trainer))[0]  # noqa: E731
    with patch.object(clients, "_finished", kept):
        said = clients.train(place, asked, Crowd(skew=0.5))
    return found, said.get("judged"), said.get("accuracy")


def test_clients_keep_statistics_of_their_own_which_are_the_mean_in_the_end_and_go_on(tmp_path):
    """A run of four steps that goes on to eight is one of eight, in float64, batch norms of three clients too."""
    rng = np.random.default_rng(3)
    np.savez(tmp_path / "some.npz", images=rng.normal(size=(60, 3, 16, 16)), labels=rng.integers(0, 5, 60))
    built = str(data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache"))
    train = Train(global_batch=12, seq_len=256, image=16, optimizer="sgd", dtype="fp32")
    more = {"settings": {"precision": "float64"}, "judged_every": 1, "held_out": 0.2}
    asked = of_clients(built, "fedavg:h=2,clients=2", 8, **more)
    asked = msgspec.structs.replace(asked, model=model(VGG), train=train)
    whole, judged, _ = launch_kept(3, of_images, asked)[0]
    halves = msgspec.structs.replace(asked, out=str(tmp_path / "out"))
    launch_kept(3, of_images, msgspec.structs.replace(halves, steps=4))
    found, again, _ = launch_kept(3, of_images, msgspec.structs.replace(halves, resume=True))[0]
    assert [name for name, _ in found] == [name for name, _ in whole]
    assert any("running_mean" in name and float(values.abs().max()) > 1e-3 for name, values in whole)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for (_, a), (_, b) in zip(found, whole))
    assert list(again.values()) == pytest.approx(list(judged.values()), rel=1e-9)


def of_one_server(rank, asked):
    """The bias and weights [1 + features, classes] before and behind a run of clients, on the first rank."""
    place, found = World(rank, 3, rank, 3, socket.gethostname(), torch.device("cpu")), []
    finished, begun = clients._finished, clients.taken_up

    def keep(trainer):
        held = {name: values for _, (name, *_), _, _, values in local.state(trainer)}
        weight = held["classifier.weight"].view(5, 12).T
        found.append(torch.cat((held["classifier.bias"][None], weight)))

    first = lambda job, trainer, *rest: (keep(trainer), begun(job, trainer, *rest))[1]  # noqa: E731
    last = lambda job, trainer, *rest: (finished(job, trainer, *rest), keep(trainer))[0]  # noqa: E731
    with patch.multiple(clients, taken_up=first, _finished=last):
        clients.train(place, asked, Crowd())
    return found


@pytest.mark.parametrize(("words", "mu"), [("fedavg:h=3", 0.0), ("fedprox:h=3,mu=0.5", 0.5)])
def test_regressions_of_the_check_on_fedprox_are_those_of_real_clients(words, mu, tmp_path):
    """Of full batches, whose order is no matter, in float64."""
    rng = np.random.default_rng(2)
    features, labels, owners = rng.normal(size=(12, 12)), rng.integers(0, 5, 12), np.repeat(range(3), 4)
    np.savez(tmp_path / "some.npz", features=features, labels=labels, clients=owners)
    built = str(data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache"))
    asked = of_clients(built, words, 12, settings={"precision": "float64"})
    before, behind = launch_kept(3, of_one_server, asked)[0]
    samples = [(features[owners == one], labels[owners == one]) for one in range(3)]
    regression = RegressionClients(samples, 4, 0.1, mu)
    found = regression.replayed(rounds_of(words, Crowd(), 3, 36), before.double().numpy())
    assert np.abs(found - behind.numpy()).max() < 1e-9 < float((behind - before).abs().max())
