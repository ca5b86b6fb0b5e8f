"""Clients on a virtual clock: what they come to is what real processes do."""

import msgspec
import pytest

from meshwright.plan import parse
from meshwright.run import clients, data, launch, loop
from meshwright.run.by_clock import train_by_clock
from meshwright.run.data import tokenizer
from meshwright.run.settings import Settings
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from meshwright.world.crowd import Crowd, factors
from tests.run.processes import launch_kept

TRAIN = Train(global_batch=24, seq_len=1, features=64, optimizer="sgd", dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("digits", tokenizer.Bytes(), tmp_path_factory.mktemp("cache")))


def asked(corpus, words, steps=8, replicas=3, **said):
    settings = Settings(lr=0.2, clip=0.0, precision="float64")
    plan = parse(f"dp{replicas} mb{24 // replicas} sync={words}")
    how = {"settings": settings, "corpus": corpus, "steps": steps, "quiet": True, "judged_every": 1, "held_out": 0.2}
    train = msgspec.structs.replace(TRAIN, **said)
    return loop.Job(model=load("digits-perceptron"), plan=plan, train=train, **how)


def by_clock(rank, job, world):
    return [tuple(one) for one in train_by_clock(job, world)]


@pytest.mark.parametrize(
    "words",
    [
        "fedavg:h=2",
        "fedavg:h=2,clients=2,codec=int8",
        "fedprox:h=2,mu=0.5",
        "fedamd:h=2,period=2",
        "feddip:h=2,rounds=4",
    ],
)
def test_clients_whose_order_hangs_on_nothing_come_to_what_processes_do(words, corpus):
    """Loss and accuracy at the end, in float64, of clients with uneven classes, whoever answers first."""
    job, world = asked(corpus, words), Crowd(skew=0.3)
    (*_, last) = launch_kept(1, by_clock, job, world)[0]
    found = launch.start(clients.train, job, world, num_ranks=3, device="cpu", stops=True)
    assert last[2] == pytest.approx(next(iter(found["judged"].values())), rel=1e-9)
    assert last[3] == next(iter(found["accuracy"].values()))
    assert last[1] == found["clients"]["merged"]


def test_momentum_of_each_client_is_its_own(corpus):
    job = asked(corpus, "fedavg:h=2", optimizer="momentum")
    (*_, last) = launch_kept(1, by_clock, job, Crowd())[0]
    found = launch.start(clients.train, job, Crowd(), num_ranks=3, device="cpu", stops=True)
    assert last[2] == pytest.approx(next(iter(found["judged"].values())), rel=1e-9)


def test_times_are_those_of_the_world_and_equal_whenever_they_are_asked_for(corpus):
    """Three clients, one of them four times as slow: a round of two steps takes eight seconds."""
    world = Crowd(speeds=factors("1/1/4"))
    waits = launch_kept(1, by_clock, asked(corpus, "fedavg:h=2"), world)[0]
    assert [one[0] for one in waits] == [8, 16, 24, 32] and [one[1] for one in waits] == [6, 12, 18, 24]
    words = ("fedbuff:h=2,buffer=2", "fedfix:h=2,every=3s", "favano:h=4,clients=2,every=3s", "fedcompass:h=4,least=1")
    for text in words:
        job = asked(corpus, text, steps=24)
        found, again = (launch_kept(1, by_clock, job, world)[0] for _ in range(2))
        assert found == again and found[-1][1] >= 72 and found[-1][0] < 96 * 2
        assert found[-1][3] > 0.2  # a guess is 0.1
