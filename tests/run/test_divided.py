"""Sums of which each process makes a part of its own, against one process."""

from collections import Counter

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.slices import Portions
from meshwright.run import equality
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import codes, local
from tests.run.processes import launch
from tests.run.small import llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")


def counted(rank: int, model, text: str, train):
    """Bytes that a process sends to others in a step, and the exchanges that it records."""
    bytes_sent, real = [], dist.batch_isend_irecv

    def watched(ops):
        bytes_sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    dist.batch_isend_irecv = watched
    _, _, sent = codes.trained(rank, model, text, train, 1, local.FP32)
    return sum(bytes_sent), sent


def test_bytes_on_the_wire_are_those_of_the_simulated_messages():
    """Of all processes exactly; of each to what rounding parts of a bucket to whole values leaves."""
    text, made = "dp4 mb1 sync=dedloc:sums=3/1/0x2", llama(vocab=64)
    got = launch(4, counted, made, text, TRAIN)
    run = simulate(parse(text), made, load("4x1xh100"), TRAIN, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    moves = [move for key in graph.cost_key for move in programs[key].moves if move.op == "neighbours"]

    sizes = Counter(num_bytes for kind, num_bytes in got[0][1] if kind == "all_reduce")
    whole = sum(size * count for size, count in sizes.items())
    # two moves an exchange, there and back, as no bucket is larger than a piece
    assert sum(move.num_bytes for move in moves) == 2 * whole
    assert sum(sent for sent, _ in got) == 2 * 3 * whole
    # the first: a quarter of its values there, and three quarters as sums to three; the last: all there
    assert abs(got[0][0] - (0.25 + 3 * 0.75) * whole) <= 4 * 8 * sizes.total() and got[3][0] == whole


def test_whoever_sums_training_is_that_of_one_process():
    plan, portions = parse("dp2 tp2 mb1 shares=3,1 sync=dedloc:sums=1/2").on(4), Portions(counts=(3, 1))
    case = equality.EqualityCase(model=llama(), plan=plan, train=TRAIN, portions=portions)
    assert [found.most < 1e-11 for found in equality.apart([case])] == [True]


def test_a_plan_that_leaves_the_parts_open_is_not_run():
    (found,) = unexecutable(parse("dp4 mb1 sync=dedloc").on(4), llama(), TRAIN)
    assert found.code == "P033" and "which part of the sums each replica makes" in found.message
