"""Gossip between real processes: the trajectory of every replica by hand in float64, bytes, checkpoints."""

import numpy as np
import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import codes, gossip, local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TOLERANCE = 1e-12
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")


@pytest.mark.parametrize(
    ["plan", "words", "replicas", "every", "overlap", "keep"],
    [
        ("dp4 mb1", "graph=exponential", 4, 1, False, False),
        ("dp4 mb1", "graph=matching,overlap=yes,h=2", 4, 2, True, False),
        ("dp4 mb1", "graph=ring,variance=kept", 4, 1, False, True),
        ("dp4 zero1 shard2 mb1", "graph=ring", 2, 1, False, False),
        ("dp2 tp2 mb2", "graph=ring,overlap=yes", 2, 1, True, False),
    ],
)
def test_every_replica_trains_as_the_weights_of_its_graph_say(plan, words, replicas, every, overlap, keep):
    text, last = f"{plan} sync=gossip:{words}", 4
    name = words.split(",")[0].removeprefix("graph=")
    got = launch(parse(text).layout.num_ranks, local.trained, llama(), text, TRAIN, last)
    wanted = launch(1, gossip.by_hand, llama(), TRAIN, replicas, last, name, every, overlap, keep)[0]
    for replica, (seen, state) in enumerate(wanted):
        mine = [rank for rank in got if rank[0] == replica]
        for _, losses, *_ in mine:
            for ours, theirs in zip(losses, seen, strict=True):
                assert ours == pytest.approx(theirs, rel=TOLERANCE)
        for key in ("param", "exp_avg"):
            apart = differences(local.whole([held for _, _, held, *_ in mine], key), local.whole([state], key))
            assert max(apart.values()) <= TOLERANCE


@pytest.mark.parametrize(
    ["graph", "words", "share", "rounds"], [("ring", "int8", 1.0, 8), ("torus", "topk:share=0.1", 0.2, 60)]
)
def test_changes_in_a_code_are_mixed_as_by_hand_and_keep_the_mean_of_all(graph, words, share, rounds):
    got = np.stack(launch(4, gossip.consensus, graph, words, share, 300, rounds), axis=1)
    wanted = gossip.consensus_by_hand(graph, words, share, 300, rounds)
    assert got == pytest.approx(wanted, abs=1e-12)
    mean = np.mean([gossip.values_of(rank, 300) for rank in range(4)], axis=0)
    assert got[-1].mean(axis=0) == pytest.approx(mean, abs=1e-12)
    apart = np.abs(got - mean).max(axis=(1, 2))
    assert apart[-1] < 0.2 * apart[0]  # and replicas come nearer, though a tenth of the values travels


@pytest.mark.parametrize(
    ["plan", "words", "steps"],
    [
        ("dp4 mb1", "graph=exponential", 2),
        ("dp4 mb1", "graph=ring,overlap=yes,moments=mean", 2),
        ("dp4 mb1", "graph=random,degree=3,h=2,codec=topk,share=0.1", 2),
        ("dp2 pp2 mb1", "graph=ring,codec=int8", 1),
    ],
)
def test_bytes_that_a_rank_sends_are_those_that_the_simulated_exchange_moves(plan, words, steps):
    """Of a cycle of turns; with overlap the messages of the last step are still on their way."""
    text = f"{plan} sync=gossip:{words}"
    read, made = parse(text), llama(vocab=64)
    got = launch(read.layout.num_ranks, local.trained, made, text, TRAIN, steps, local.FP32)
    run = simulate(read, made, load(f"{read.layout.num_ranks}xh100"), TRAIN, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    rank_of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    for number, (*_, sent, _) in enumerate(got):
        stage = number // read.layout.stride("pp") % read.layout.pp
        moves = [
            move
            for task in range(graph.num_tasks)
            if rank_of[task] == stage
            for move in programs[graph.cost_key[task]].moves
            if move.op == "neighbours"
        ]
        assert moves and {kind for kind, _ in sent} == {"neighbours"}
        assert sorted(size for _, size in sent) == sorted(move.num_bytes * move.group.fan for move in moves)


def test_training_goes_on_from_a_checkpoint_with_what_was_on_its_way_and_what_neighbours_know(tmp_path):
    plan = "dp4 mb1 sync=gossip:graph=ring,codec=int8,overlap=yes"
    for on, again, *_ in launch(4, codes.resumed, llama(), plan, TRAIN, tmp_path, 2):
        assert on == again


def test_two_replicas_meet_in_full_and_average_as_after_local_steps_of_one():
    """To the last bit in float64."""
    one, other = (
        launch(2, local.trained, llama(), f"dp2 mb1 sync={words}", TRAIN, 3) for words in ("gossip", "local:h=1")
    )
    assert [rank[1] for rank in one] == [rank[1] for rank in other]
    for a, b in zip(one, other):
        assert all(torch.equal(x[-1], y[-1]) for x, y in zip(a[2], b[2], strict=True))


def test_under_another_plan_replicas_go_on_from_the_mean_of_those_that_met(tmp_path):
    """Messages on their way move one as far as another moves back."""
    text = "dp4 mb1 sync=gossip:overlap=yes"
    got = launch(4, gossip.taken_over, llama(), text, "dp4 mb1", TRAIN, str(tmp_path))
    means = [torch.stack(same).mean(0) for same in zip(*(before for before, _ in got))]
    assert max((a - b).abs().max() for a, b in zip(got[0][0], got[1][0])) > 1e-6
    for _, after in got:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(after, means, strict=True))
