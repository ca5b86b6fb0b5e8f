"""ADMM's prices: how far a step is pulled, and the graphs on which neighbours cannot keep any."""

import pytest

import meshwright as mw
from meshwright.plan import check, parse
from meshwright.sync.groups import graph
from meshwright.sync.policy import read
from meshwright.sync.record import Mix

MODEL, TRAIN = mw.load_model("llama3.2-1b"), mw.parse_train("batch=32,seq=2048")


def test_a_pull_minimises_the_penalty_and_the_distance_to_the_step_together():
    """Of one value at 3, pulled to a middle at 1 between two neighbours, by hand: 2 rho n rate = 0.5."""
    mix = Mix(graph="ring", rho=0.25)
    share = mix.pulled(0.5, 2)
    at = 3 + share * (1 - 3)
    assert share == pytest.approx(1 / 3)
    assert (at - 3) / 0.5 + 2 * 0.25 * 2 * (at - 1) == pytest.approx(
        0
    )  # the slope of |x - 3|^2 / 2 rate + rho 2 |x - 1|^2


def test_words_read_back_and_noise_is_that_of_the_authors():
    policy = read("admm:h=4,rho=5,noise=1")
    assert read(policy.text).values == policy.values and policy.when == 4 and policy.meets and policy.apart
    assert policy.mix.sampled == pytest.approx(2**0.5 / 10)


def test_edges_of_some_graphs_go_one_way():
    assert graph("ring", 5).mutual and graph("torus", 6).mutual and graph("random", 8).mutual
    assert not graph("static-exponential", 8).mutual and graph("static-exponential", 3).mutual


@pytest.mark.parametrize(
    ["words", "reason", "legal"],
    [
        ("rho=0.1,graph=exponential", "neighbours are others in every exchange", "graph=ring"),
        ("rho=0.1,graph=static-exponential", "replicas hear some that do not hear them", "graph=torus"),
        ("rho=0.1,graph=random,degree=1", "not connected", "degree=2"),
    ],
)
def test_graphs_without_mutual_neighbours_are_refused_with_some_that_have_them(words, reason, legal):
    found = check(parse(f"dp8 sync=admm:{words}"), MODEL, mw.load_cluster("8xh100"), TRAIN)
    assert [d.code for d in found] == ["Y003"]
    assert reason in found[0].message and legal in found[0].help


def test_it_sends_what_gossip_sends_and_keeps_two_values_more_of_each():
    where = mw.load_cluster("8x1xh100,10gbe")
    some, other = (
        mw.predict(MODEL, where, TRAIN, parse(f"dp8 mb1 full sync={words}"), detail=False)
        for words in ("admm:rho=0.1,h=2", "gossip:h=2")
    )
    assert some.round.part_bytes == other.round.part_bytes
    assert other.step_time_s < some.step_time_s < 1.02 * other.step_time_s
    kept = some.peak_memory_bytes - other.peak_memory_bytes
    assert kept == pytest.approx(1.03 * 2 * 4 * MODEL.num_params, rel=0.01)  # 3% are the allocator's
