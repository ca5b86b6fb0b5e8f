"""Replicas with batch shares of their own, as unequal devices have them, against one process."""

import pytest

pytest.importorskip("torch")

import meshwright as mw
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.slices import Portions, portions_of
from meshwright.run import equality
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
    # gradients are alike to rounding; Adam's first steps enlarge that of the smallest of them
    assert {words: one for words, one in zip(PLANS, equality.apart(cases)) if not one.most < 1e-9} == {}


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
