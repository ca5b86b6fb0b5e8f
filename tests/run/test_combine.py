"""Gradients of replicas combined in other ways than added, in real processes: bytes, and a replica that lies."""

import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import codes, local, small
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")


def lying(rank: int, model, text: str, train, last: int, settings):
    """Losses of a job on one batch whose last rank sends gradients of -20 times their size."""
    trainer = local.begun(model, text, train, settings)
    for bucket in trainer.exchanges if rank == trainer.mesh.world - 1 else ():
        hidden = bucket.exchange

        def exchange(bucket=bucket, hidden=hidden):
            bucket.gradient_buffer().mul_(-20)
            hidden()

        bucket.exchange = exchange
    dp = trainer.mesh["dp"]
    batch = small.batch(train, model.vocab, 0, dp.size, dp.index)  # one batch again and again can be learnt
    losses = [trainer.step(batch).loss for _ in range(last)]
    trainer.settle()
    return losses, local.state(trainer)


@pytest.mark.parametrize(
    "text",
    [
        "dp4 mb1 sync=step:combine=median",
        "dp4 mb1 sync=int8:combine=trimmed",
        "dp3 mb1 sync=step:combine=flag",
        "dp4 mb1 sync=local:h=1,combine=median,moments=mean",
    ],
)
def test_bytes_on_the_wire_are_those_that_the_simulated_step_moves(text):
    """Whole values of every replica are gathered; afterwards all hold the same parameters."""
    read, made = parse(text), llama(vocab=64)
    train = Train(global_batch=12, seq_len=16, dtype="fp32")
    averaged = "local" in text
    got = launch(read.layout.dp, local.trained if averaged else codes.trained, made, text, train, 1, local.FP32)
    run = simulate(read, made, load(f"{read.layout.dp}xh100"), train, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    moved = [
        (move.op, move.num_bytes)
        for task in range(graph.num_tasks)
        if programs[graph.cost_key[task]].kind == "exchange"
        for move in programs[graph.cost_key[task]].moves
        if move.op == "all_gather"
    ]
    assert moved
    for one in got:
        assert sorted(one[3] if averaged else one[2]) == sorted(moved)
    held = [one[2] if averaged else one[1] for one in got]
    assert max(differences(*(local.whole([one], "param") for one in held[:2])).values()) == 0


def test_the_loss_goes_down_with_a_lying_replica_where_the_sum_goes_up():
    """Four replicas, one of which sends -20 times its gradient: the sum points away from what the others learn."""
    words = ("", " sync=step:combine=median", " sync=step:combine=flag")
    summed, *robust = (launch(4, lying, llama(vocab=64), f"dp4 mb1{w}", TRAIN, 8, local.FP32) for w in words)
    assert summed[0][0][-1] > summed[0][0][0] + 0.1
    for got in robust:
        assert got[0][0][-1] < got[0][0][0] - 0.4
        one, other = (local.whole([state], "param") for _, state in (got[0], got[3]))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ["text", "said"],
    [
        ("dp2 mb1 sync=step:combine=median", "median is taken of 3 replicas at least, and 2 exchange"),
        ("dp4 mb1 sync=step:combine=trimmed,cut=2", "trimmed:cut=2 is taken of 5 replicas"),
        ("dp4 mb1 sync=powersgd:combine=median", "adds factors on their way"),
        ("dp4 tp2 mb1 sync=step:combine=flag", "flag combines them by what is beside them"),
        ("dp4 zero1 mb1 sync=step:combine=median", "zero1 scatters sums while they are taken"),
        ("dp1 mb1 sync=step:combine=median", "gradients are combined between replicas, and the plan has one"),
    ],
)
def test_plans_in_which_nothing_can_be_combined_are_refused(text, said):
    plan = parse(text)
    found = check(plan, llama(vocab=64), load(f"{plan.num_ranks}xh100"), Train(global_batch=16, seq_len=16))
    assert [said in d.message for d in found] == [True], MeshwrightError(found)


def test_a_step_with_a_median_costs_its_gather_and_the_sorting():
    """Beside the sum: gathers instead of reductions, and memory that the network of comparisons reads and writes, 5
    steps of 6 runs, the mean of two and itself, for 4 replicas."""
    model, cluster = llama(vocab=64), load("4xh100")
    runs = [
        simulate(parse(f"dp4 mb1{words}"), model, cluster, TRAIN, standard())
        for words in ("", " sync=step:combine=median")
    ]
    programs = [[run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()] for run in runs]
    decoded = sum(p.work.num_bytes for p in programs[1] if p.name == "decode")
    assert decoded == (5 * 6 + 2 + 1) * 4 * model.num_params
    assert not any(p.name == "decode" for p in programs[0])
    assert runs[1].step_time_s > runs[0].step_time_s
