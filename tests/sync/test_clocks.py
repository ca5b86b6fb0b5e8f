"""Clocks of replicas: how often they tick, what a graph asks for, and what their momenta come to."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.plan import check, parse
from meshwright.sync.clocks import Clocks, edges, resistances
from meshwright.sync.groups import graph
from meshwright.sync.policy import read

RING = Clocks(graph="ring")


def test_a_ring_asks_for_as_many_meetings_as_its_laplacian_says_by_hand():
    """Of four replicas: eigenvalues 0, 2, 2, 4 over four edges, and 3/4 times four across an edge."""
    assert resistances(graph("ring", 4)) == pytest.approx((2.0, 1.5))
    assert RING.rate(4) == pytest.approx(6**0.5)
    assert Clocks(graph="ring", meetings=3).rate(4) == 6


def test_every_replica_steps_once_in_a_unit_and_edges_tick_as_poisson_processes():
    clocks, units = Clocks(graph="ring", meetings=1.0, seed=5), 4000
    some = [clocks.ticks(4, unit) for unit in range(units)]
    for ticks in some:
        assert list(ticks) == sorted(ticks)
        assert sorted(tick.replica for tick in ticks if tick.other < 0) == [0, 1, 2, 3]
    for pair in edges(graph("ring", 4)):  # each half a time in a unit
        counts = np.array([sum((t.replica, t.other) == pair for t in ticks) for ticks in some])
        assert counts.mean() == pytest.approx(0.5, abs=0.05) and counts.var() == pytest.approx(0.5, abs=0.06)


def test_both_of_a_meeting_have_it_at_one_time_and_others_do_not():
    own = [RING.of_replica(replica, 4, 7) for replica in range(4)]
    met = [(tick.at, {replica, tick.other}) for replica in range(4) for tick in own[replica] if tick.other >= 0]
    assert len(met) == 2 * sum(tick.other >= 0 for tick in RING.ticks(4, 7))
    assert all(met.count(one) == 2 for one in met)


def test_all_come_to_the_minimum_of_the_sum_of_their_unlike_losses_where_plain_steps_and_averages_do_not():
    """Least squares of four replicas on a ring, of which each has rows of its own, in numpy with a policy's constants
    and ticks."""
    drawn, n, values = np.random.default_rng(0), 4, 3
    made = [(np.diag([1.0, 0.6, 0.3]) @ np.linalg.qr(drawn.standard_normal((3, 3)))[0], drawn.normal(size=3))]
    made += [(made[0][0] @ np.linalg.qr(drawn.standard_normal((3, 3)))[0], drawn.normal(size=3)) for _ in range(n - 1)]
    best = np.linalg.lstsq(*(np.concatenate(some) for some in zip(*made)), rcond=None)[0]
    clocks = Clocks(graph="ring", condition=1 / 0.3**2)
    rate = 1 / 4  # of losses that are at most as curved as 1
    said = clocks.constants(n, rate)
    flow = np.array(said.mixing)
    vectors = np.linalg.eig(flow)
    x, at = np.zeros((n, 6, values)), np.zeros(n)

    def moved(i: int, to: float) -> None:
        over = (vectors[1] * np.exp(vectors[0] * (to - at[i]))) @ np.linalg.inv(vectors[1])
        x[i], at[i] = over.real @ x[i], to

    plain, mixing = np.zeros((n, values)), np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3
    apart = []
    for unit in range(600):
        slopes = np.stack([a.T @ (a @ own - b) for (a, b), own in zip(made, plain)])
        plain = mixing @ (plain - rate * slopes)
        for tick in clocks.ticks(n, unit):
            i, j = tick.replica, tick.other
            moved(i, unit + tick.at)
            if j < 0:
                a, b = made[i]
                along = a.T @ (a @ x[i, 0] - b) - said.flat * x[i, 0] - x[i, 3]
                x[i, 0] -= rate * along
                x[i, 1] -= rate * said.momentum * along
                x[i, 3] += said.answers * along
                continue
            moved(j, unit + tick.at)
            differ = x[i, 2] + x[i, 4] - x[j, 2] - x[j, 4]
            for own, sign in ((i, 1), (j, -1)):
                x[own, 4] -= sign * said.agrees * differ
                x[own, 5] -= sign * said.agrees_momentum * differ
        apart.append(np.abs(x[:, 0] - best).max())
    assert apart[-1] < 1e-5 < 1e-2 < np.abs(plain - best).max()


@pytest.mark.parametrize(
    ["words", "train", "reason", "legal"],
    [
        ("dadao:graph=matching", "optimizer=sgd", "neighbours are others in every exchange", "graph=ring"),
        ("dadao:graph=static-exponential", "optimizer=sgd", "do not hear them", "graph=torus"),
        ("dadao", "optimizer=adamw", "updates of sgd", "optimizer=sgd"),
        ("dadao", "optimizer=sgd,grow=0.1,most=64", "moves momenta and duals", "drop grow, align and clusters"),
        ("admm:rho=0.1", "optimizer=adamw,align=0.97", "pulled towards neighbours", "drop grow, align and clusters"),
    ],
)
def test_what_has_no_clocks_is_refused_with_what_has(words, train, reason, legal):
    asked = mw.parse_train(f"batch=8,seq=2048,{train}")
    found = check(parse(f"dp8 sync={words}"), mw.load_model("llama3.2-1b"), mw.load_cluster("8xh100"), asked)
    assert [d.code for d in found] == ["Y003"]
    assert reason in found[0].message and legal in found[0].help


def test_words_read_back():
    policy = read("dadao:condition=10,meetings=2,clock=4")
    assert read(policy.text).values == policy.values
    assert policy.clocks == Clocks(graph="ring", condition=10.0, meetings=2.0, seed=4) and policy.meets
