"""Replicas with batch shares of their own, as unequal devices have them, against one process."""

import pytest

pytest.importorskip("torch")

import msgspec
import torch

import meshwright as mw
from meshwright.plan import Plan, parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.slices import Portions, portions_of
from meshwright.run import equality, mesh
from meshwright.run.data import Batch
from meshwright.run.record import Off, Recorder, install, recorder
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from tests.run.processes import start_kept
from tests.run.small import llama

TRAIN = mw.parse_train("batch=6,seq=16,dtype=fp32")
#: Plans of four ranks with the microbatches of every replica; two kinds of them stand for two kinds of devices.
PLANS = {
    "dp4 mb1 shares=1,2": Portions(counts=(1, 1, 2, 2)),
    "dp4 mb1 zero1 shares=1,2": Portions(counts=(1, 1, 2, 2)),
    "dp2 tp2 mb2 shares=2,1": Portions(counts=(2, 1)),
    "pp2 dp2 mb1 1f1b shares=2,4": Portions(counts=(2, 4)),
    # state by memory and batch by speed, apart: a replica of more batch in smaller microbatches, and of less state
    "dp4 mb1 zero1 shares=1,2 hold=3,1": Portions(counts=(1, 1, 2, 2), hold=(3, 3, 1, 1)),
    "dp4 mb2 zero2 shares=1,1 mbs=1,2 hold=1,5": Portions(counts=(1,) * 4, rows=(1, 1, 2, 2), hold=(1, 1, 5, 5)),
    "dp2 tp2 mb2 zero1 shares=4,1 mbs=1,2 hold=0,1": Portions(counts=(4, 1), rows=(1, 2), hold=(0, 1)),
    "pp2 dp2 mb2 zero1 1f1b shares=2,2 mbs=1,2 hold=2,7": Portions(counts=(2, 2), rows=(1, 2), hold=(2, 7)),
    "dp4 mb2 fsdp shares=1,1 mbs=2,1": Portions(counts=(1,) * 4, rows=(2, 2, 1, 1)),
}


def test_replicas_with_unequal_shares_train_as_one_process_does():
    cases = [
        equality.EqualityCase(model=llama(), plan=parse(words).on(4), train=TRAIN, portions=each)
        for words, each in PLANS.items()
    ]
    found = dict(zip(PLANS, equality.apart(cases)))
    assert all(one.whole and max(one.loss, one.gradient) < 1e-13 for one in found.values()), found
    # Adam's first steps divide gradients by their own size, which enlarges the rounding of the smallest of them
    assert all(one.parameter < 1e-9 for one in found.values()), found


def test_the_share_of_a_replica_is_that_of_its_kind_of_devices():
    cluster = mw.load_cluster("2xh100 + 2xa100")
    plan = parse("dp4 mb1 shares=2,1").on(4)
    assert portions_of(plan, cluster) == Portions(counts=(2, 2, 1, 1))
    assert portions_of(parse("dp4 mb1").on(4), cluster) == Portions()
    own = parse("dp4 mb3 shares=1,1 mbs=3,1 zero1 hold=4,1").on(4)
    assert portions_of(own, cluster) == Portions(counts=(1,) * 4, rows=(3, 3, 1, 1), hold=(4, 4, 1, 1))


@pytest.mark.parametrize(
    "words, said",
    [
        ("fsdp hold=1,2", "cuts rows evenly"),
        ("zero2 shares=1,2", "meet once a step"),
        ("sync=local:h=4 shares=1,2", "steps of their own"),
    ],
)
def test_shares_of_replicas_that_meet_within_a_step_or_not_in_each_are_refused(words, said):
    (found,) = unexecutable(parse(f"dp4 mb1 {words}").on(4), llama(), TRAIN)
    assert found.code == "P033" and said in found.message


def _mixed(world):
    """Differences of a step of two replicas, in fp32 and in bf16, from the mean of one process that computes each half
    of the batch in its own precision: of the loss and of gradients; of the halves' gradients; and whether masters are
    the same bits on both."""
    plan, said = parse("dp2 mb1 dtypes=fp32,bf16").on(2), Settings(lr=1e-2)
    halves = msgspec.structs.replace(TRAIN, global_batch=3)
    case = equality.EqualityCase(model=llama(), plan=plan, train=TRAIN)
    seen = []

    def trained(trainer, rows):
        trainer.before_update.append(lambda: seen.append([h.gradient.clone() for h in trainer.optimizer.held]))
        tokens = equality._batch(msgspec.structs.replace(case, plan=Plan().on(1)), 0, all_rows).tokens
        return trainer.step(Batch(tokens[rows], None))

    all_rows = Trainer(llama(), parse("mb6").on(1), TRAIN, mesh.alone(), settings=said)
    both = Trainer(llama(), plan, TRAIN, mesh.build(plan), settings=said, portions=Portions(dtypes=("fp32", "bf16")))
    alone = [Trainer(llama(), parse(f"mb1 {d}").on(1), halves, mesh.alone(), settings=said) for d in ("fp32", "bf16")]
    with torch.no_grad():  # one process draws in the precision of its half
        for one, mine in ((a, b) for other in alone for a, b in zip(other.exchanges, both.exchanges)):
            one.master.copy_(mine.master)
            one.publish()
    loss = trained(both, slice(3 * world.rank, 3 * world.rank + 3)).loss
    losses = [trained(one, slice(3 * i, 3 * i + 3)).loss for i, one in enumerate(alone)]
    far = [float((a - (b + c) / 2).abs().max() / a.abs().max()) for a, b, c in zip(*seen)]
    masters = torch.cat([h.master for h in both.optimizer.held])
    every = [torch.empty_like(masters) for _ in range(2)]
    torch.distributed.all_gather(every, masters)
    apart = [float((b - c).abs().max() / b.abs().max()) for b, c in zip(seen[1], seen[2])]
    return loss - sum(losses) / 2, max(far), max(apart), torch.equal(*every)


def _recorded(world):
    """Bytes that one step of two replicas exchanges by what the recorder says, and of all elements in fp32."""
    plan = parse("dp2 mb3 zero2 hold=1,3").on(2)
    case = equality.EqualityCase(model=llama(), plan=plan, train=TRAIN)
    trainer = Trainer(llama(), plan, TRAIN, mesh.build(plan), settings=Settings(), portions=Portions(hold=(1, 3)))
    install(Recorder(rank=world.rank))
    try:
        recorder().step_begin(0)
        trainer.step(equality._batch(case, 0, trainer))
        trainer.settle()
        recorder().step_end()
        found = recorder().recording()
    finally:
        install(Off())
    said: dict[str, int] = {}
    for one in (found.labels[number] for number in found.label):
        said[one.kind] = said.get(one.kind, 0) + (one.num_bytes or 0)
    ended = bool((found.end_ns >= 0).all())
    return said, 4 * sum(bucket.values.numel() for bucket in trainer.exchanges), ended


def _pair(world):
    return _mixed(world), _recorded(world)


@pytest.fixture(scope="module")
def pair():
    """The findings of two processes, which both tests below read."""
    return start_kept(_pair, num_ranks=2)


def test_uneven_shards_are_recorded_with_the_bytes_that_travel(pair):
    """By hand: a rank of hold=1,3 has three quarters of a bucket, so that two of that size are 1.5 times the whole."""
    _, (said, whole, ended) = pair
    assert ended
    for kind in ("reduce_scatter", "all_gather"):
        assert said[kind] == pytest.approx(1.5 * whole, rel=1e-3), said


def test_replicas_of_two_precisions_step_by_the_mean_of_what_each_computes(pair):
    (loss, far, apart, same), _ = pair
    assert abs(loss) < 1e-6 and far < 1e-6  # sums of fp32 in another order
    assert apart > 1e-3  # bf16 has 8 bits: what differs is seen
    assert same  # both update alike
