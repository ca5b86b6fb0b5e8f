"""ADMM between real processes: the trajectory of every replica by hand in float64, bytes, checkpoints."""

import numpy as np
import pytest

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import admm, codes, local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
RING = [[1, 3], [0, 2], [1, 3], [0, 2]]


@pytest.mark.parametrize(
    ["plan", "words", "replicas", "every", "rho", "noise"],
    [
        ("dp4 mb1", "rho=0.3,h=2,noise=0.01", 4, 2, 0.3, 0.01),
        ("dp4 zero1 shard2 mb1", "rho=2", 2, 1, 2.0, 0.0),
        ("dp2 tp2 mb2", "rho=0.5", 2, 1, 0.5, 0.0),
    ],
)
def test_every_replica_trains_as_proximal_steps_and_duals_by_hand(plan, words, replicas, every, rho, noise):
    text, last = f"{plan} sync=admm:{words}", 4
    got = launch(parse(text).layout.num_ranks, local.trained, llama(), text, TRAIN, last)
    wanted = launch(1, admm.by_hand, llama(), TRAIN, replicas, last, every, rho, noise)[0]
    for replica, (seen, state) in enumerate(wanted):
        mine = [rank for rank in got if rank[0] == replica]
        for _, losses, *_ in mine:
            for ours, theirs in zip(losses, seen, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-11)
        apart = differences(local.whole([held for _, _, held, *_ in mine], "param"), local.whole([state], "param"))
        assert max(apart.values()) <= 1e-10  # Adam divides by the roots of squares that are next to nothing


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_least_squares_between_processes_are_the_authors_algorithm_with_its_argmin_solved(noise):
    """Rounds of so many proximal steps that their argmin is found."""
    found = launch(4, admm.least_squares, "ring", 0.7, noise, 15, 300)
    got, duals = np.stack([values for values, _ in found], axis=1), np.stack([dual for _, dual in found])
    wanted, priced = admm.least_squares_by_hand(RING, 0.7, noise, 15)
    assert got == pytest.approx(wanted, abs=1e-9)
    assert duals == pytest.approx(priced, abs=1e-9)
    assert np.abs(duals.sum(axis=0)).max() < 1e-9  # prices of all are nothing together
    if not noise:  # all replicas have the least squares of all rows
        every = [np.concatenate(some) for some in zip(*(admm.problem(rank) for rank in range(4)))]
        least = np.linalg.lstsq(*every, rcond=None)[0]
        assert np.abs(admm.least_squares_by_hand(RING, 0.7, 0.0, 400)[0][-1] - least).max() < 1e-9
        assert np.abs(got[-1] - least).max() < 0.3 * np.abs(got[0] - least).max()


def test_samples_of_all_replicas_have_the_mean_of_the_posterior():
    """In numpy: of the density exp(-sum of losses), whose covariance their own has to within a bias."""
    values, _ = admm.least_squares_by_hand(RING, 2.0, 1.0, 2000)
    matrix, right = (np.concatenate(some) for some in zip(*(admm.problem(rank) for rank in range(4))))
    mean = np.linalg.lstsq(matrix, right, rcond=None)[0]
    deviation = np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix)))
    of_all = values[200:].mean(axis=1)
    assert np.abs(of_all.mean(axis=0) - mean).max() < 0.3 * deviation.max()
    assert of_all.std(axis=0) == pytest.approx(deviation, rel=0.5)


def test_bytes_that_a_rank_sends_are_those_that_the_simulated_exchange_moves():
    text = "dp4 mb1 sync=admm:rho=0.1,h=2"
    read, made = parse(text), llama(vocab=64)
    got = launch(read.layout.num_ranks, local.trained, made, text, TRAIN, 2, local.FP32)
    run = simulate(read, made, load(f"{read.layout.num_ranks}xh100"), TRAIN, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    moves = [
        move
        for task in range(graph.num_tasks)
        for move in programs[graph.cost_key[task]].moves
        if move.op == "neighbours"
    ]
    for *_, sent, exchanged in got:
        assert moves and not exchanged
        assert sorted(size for _, size in sent) == sorted(move.num_bytes * move.group.fan for move in moves)


def test_training_goes_on_from_a_checkpoint_with_prices_and_middles_within_a_round(tmp_path):
    plan = "dp4 mb1 sync=admm:rho=0.2,h=2,noise=0.01"
    for on, again, *_ in launch(4, codes.resumed, llama(), plan, TRAIN, tmp_path, 3):
        assert on == again
