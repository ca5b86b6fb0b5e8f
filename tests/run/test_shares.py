"""Replicas with batch shares of their own, as unequal devices have them, against one process."""

import pytest

pytest.importorskip("torch")

import meshwright as mw
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.slices import microbatches_each
from meshwright.run import equality
from tests.run.small import llama

TRAIN = mw.parse_train("batch=6,seq=16,dtype=fp32")
#: Plans of four ranks with the microbatches of every replica; two kinds of them stand for two kinds of devices.
PLANS = {
    "dp4 mb1 shares=1,2": (1, 1, 2, 2),
    "dp4 mb1 zero1 shares=1,2": (1, 1, 2, 2),
    "dp2 tp2 mb2 shares=2,1": (2, 1),
    "pp2 dp2 mb1 1f1b shares=2,4": (2, 4),
}


def test_replicas_with_unequal_shares_train_as_one_process_does():
    cases = [
        equality.EqualityCase(model=llama(), plan=parse(words).on(4), train=TRAIN, counts=each)
        for words, each in PLANS.items()
    ]
    assert [found.most < 1e-11 for found in equality.apart(cases)] == [True] * len(cases)


def test_the_share_of_a_replica_is_that_of_its_kind_of_devices():
    cluster = mw.load_cluster("2xh100 + 2xa100")
    plan = parse("dp4 mb1 shares=2,1").on(4)
    assert microbatches_each(plan.layout, cluster) == (2, 2, 1, 1)
    assert microbatches_each(parse("dp4 mb1").on(4).layout, cluster) == ()


@pytest.mark.parametrize(
    "words, said", [("zero2 shares=1,2", "meet once a step"), ("sync=local:h=4 shares=1,2", "steps of their own")]
)
def test_shares_of_replicas_that_meet_within_a_step_or_not_in_each_are_refused(words, said):
    (found,) = unexecutable(parse(f"dp4 mb1 {words}").on(4), llama(), TRAIN)
    assert found.code == "P033" and said in found.message
