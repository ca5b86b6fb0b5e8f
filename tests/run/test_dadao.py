"""DADAO between real processes, which meet in pairs: every replica by hand in float64, bytes, checkpoints."""

import numpy as np
import pytest

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.clocks import Clocks
from meshwright.sync.policy import read
from tests.run import codes, dadao, local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd")


@pytest.mark.parametrize(
    ["plan", "replicas", "meetings"], [("dp4 mb1", 4, 1.5), ("dp4 zero1 shard2 mb1", 2, 0.75), ("dp2 tp2 mb2", 2, 2.0)]
)
def test_every_replica_trains_as_the_ticks_of_all_by_hand(plan, replicas, meetings):
    text, last = f"{plan} sync=dadao:condition=50,meetings={meetings},clock=3", 4
    clocks = Clocks(graph="ring", condition=50.0, meetings=meetings, seed=3)
    got = launch(parse(text).layout.num_ranks, local.trained, llama(), text, TRAIN, last)
    wanted, duals = launch(1, dadao.by_hand, llama(), TRAIN, replicas, last, clocks)[0]
    for replica, (seen, state) in enumerate(wanted):
        mine = [rank for rank in got if rank[0] == replica]
        for _, losses, *_ in mine:
            for ours, theirs in zip(losses, seen, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10)
        apart = differences(local.whole([held for _, _, held, *_ in mine], "param"), local.whole([state], "param"))
        assert max(apart.values()) <= 1e-11
    assert max(np.abs(sum(same)).max() for same in zip(*duals)) < 1e-9  # those of agreement are nothing together


def test_bytes_that_a_rank_sends_are_those_of_its_meetings_in_the_simulated_schedule():
    text, steps = "dp4 mb1 sync=dadao:meetings=2", 5
    where, made = parse(text), llama(vocab=64)
    got = launch(where.layout.num_ranks, local.trained, made, text, TRAIN, steps, local.FP32)
    run = simulate(where, made, load(f"{where.layout.num_ranks}xh100"), TRAIN, standard())
    graph, programs, clocks = run.lowered.graph, run.lowered.programs, read(where.sync.policy).clocks
    moves = [
        move.num_bytes * move.group.fan
        for task in range(graph.num_tasks)
        for move in programs[graph.cost_key[task]].moves
        if move.op == "neighbours"
    ]
    for replica, *_, sent, _ in got:
        met = sum(
            tick.other >= 0 for step in range(steps) for tick in clocks.of_replica(replica, where.layout.dp, step)
        )
        assert met > 3 and moves
        assert sorted(size for _, size in sent) == sorted(moves * met)
        assert {kind for kind, _ in sent} == {"neighbours"}


def test_training_goes_on_from_a_checkpoint_with_momenta_and_duals(tmp_path):
    for on, again, *_ in launch(4, codes.resumed, llama(), "dp4 mb1 sync=dadao", TRAIN, tmp_path, 2):
        assert on == again
