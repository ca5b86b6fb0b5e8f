"""Sums of which each process makes a part of its own, against one process."""

from collections import Counter

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from meshwright.answer.predict import predict, simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.legality import violations
from meshwright.plan.slices import Portions
from meshwright.run import equality
from meshwright.run.mesh import build
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from meshwright.sync.divided import rounds
from meshwright.sync.policy import read
from tests.run import codes, local
from tests.run.processes import launch_kept as launch
from tests.run.small import batch, differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")


def counted(rank: int, model, text: str, train):
    """Bytes that a process sends to others in a step, and the exchanges that it records."""
    bytes_sent, real = [], dist.batch_isend_irecv

    def watched(ops):
        bytes_sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched)
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


AUX = "dp3 mb1 sync=dedloc:sums=1/1/2,aux=1"


def helped(rank: int, model, text: str):
    """Losses of three steps, the parameters, and the bytes that a process sends in each."""
    plan = parse(text)
    trainer = Trainer(model, plan, TRAIN, build(plan), settings=local.SETTINGS)
    sent, real, losses = [], dist.batch_isend_irecv, []

    def watched(ops):
        sent[-1] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched)
        for step in range(3):
            sent.append(0)
            losses.append(trainer.step(batch(TRAIN, model.vocab, step, plan.trainers, rank % plan.trainers)).loss)
    return losses, local.state(trainer), sent


def test_a_peer_that_only_sums_takes_the_same_steps_and_brings_nothing():
    """Two of three replicas train: in float64 one process's steps, on the third too. It makes half of the sums, and
    sends these to the others, and nothing else: the messages of the simulation, to the byte but for rounding."""
    model = llama(vocab=64)
    one, (got, *_, third) = launch(1, helped, model, "dp1 mb4")[0], launch(3, helped, model, AUX)
    assert got[0] == pytest.approx(one[0], rel=1e-11) and third[0] == got[0]
    apart = differences(local.whole([third[1]], "param"), local.whole([one[1]], "param"))
    assert max(apart.values()) < 1e-11
    whole = 8 * model.num_params
    assert third[2][1] == pytest.approx(2 * 0.5 * whole, rel=1e-3)  # half of the sums to two
    assert got[2][1] == pytest.approx((0.25 + 0.5 + 2 * 0.25) * whole, rel=1e-3)
    shares = Counter()
    for size, some in rounds(whole, (1, 1, 2), 1):
        for source, _, share in some.messages():
            shares[source] += size * share
    assert [third[2][1], got[2][1]] == pytest.approx([shares[2], shares[0]], rel=1e-3)


def test_a_wide_link_that_only_sums_saves_what_a_slow_one_waits_for():
    """Four trainers behind narrow links sum sooner with a fifth peer behind a wide one: the linear program gives it all
    sums, and each of theirs sends its values once and takes sums once, where four alone send 2 * 3/4 of them."""
    model, alone, beside = load_model("gpt2"), load("4x1xa100,1gbe"), load("4x1xa100,1gbe + 1x1xa100,10gbe")
    asked = Train(global_batch=40, seq_len=1024)
    one = predict(model, alone, asked, parse("mb1 sync=dedloc"), detail=False)
    other = predict(model, beside, asked, parse("mb1 sync=dedloc:aux=1"), detail=False)
    assert read(other.plan.sync.policy).sums == (0, 0, 0, 0, 1)
    assert 1.2 < one.step_time_s / other.step_time_s < 1.6


@pytest.mark.parametrize(
    ["words", "said"],
    [
        ("dp2 mb1 sync=dedloc:sums=1/1,aux=2", "aux=1"),
        ("dp2 pp2 mb1 sync=dedloc:aux=1", "pp1"),
        ("dp4 mb1 sync=dedloc:aux=1", "3 replicas"),
    ],
)
def test_plans_without_room_for_such_peers_are_refused(words, said):
    plan = parse(words)
    found = violations(plan, llama(vocab=64), load(f"{plan.layout.dp * plan.layout.pp}x1xh100"), TRAIN)
    assert any(said in f"{one.message} {one.help}" for one in found)
