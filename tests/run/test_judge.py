"""Held-out losses are those of the same rows in a step that changes nothing."""

import numpy as np
import pytest

from meshwright.run.data import Corpus, held_out
from meshwright.run.judge import Judge, share_of
from meshwright.run.settings import Settings
from meshwright.spec.workload import Train
from tests.run import local
from tests.run.processes import launch_kept as launch
from tests.run.small import llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
CORPUS = Corpus(
    tokens=np.random.default_rng(0).integers(0, 67, 2000, np.uint16),
    starts=np.array([0, 700, 1650]),
    largest=66,
    seq_len=16,
    global_batch=4,
)


def judged(rank: int, text: str):
    trainer = local.begun(llama(layers=2), text, TRAIN, Settings(precision="float64", lr=0.0))
    return before_and_after(trainer, held_out(CORPUS, 0.25)[1])


def before_and_after(trainer, held):
    """The judged loss, the mean of steps that change nothing on the same rows, and the judged loss behind them."""
    judge = Judge(trainer, held)
    before = judge.loss()
    steps = [trainer.step(share_of(trainer, held, i)).loss for i in range(judge.batches)]
    return before, sum(steps) / len(steps), judge.loss()


PLANS = ["dp1 mb4", "dp2 mb2", "dp2 mb1", "dp2 mb2 fsdp", "dp1 tp2 mb2", "dp1 cp2 mb2", "dp1 pp2 mb1 1f1b"]
POOLS = "a=[dp2 mb2 on=0:2 part=0:1] + b=[dp1 mb1 on=2:3 part=1:2]"  # other replicas, other microbatches


@pytest.mark.parametrize("text", PLANS)
def test_a_judged_loss_is_the_mean_of_steps_without_a_learning_rate(text):
    ranks = 1 if text == "dp1 mb4" else 2
    for before, steps, after in launch(ranks, judged, text):
        assert before == pytest.approx(steps, rel=1e-12)
        assert after == before


def test_several_pools_judge_as_one_process_does():
    ((_, _, expected),) = launch(1, judged, "dp1 mb4")
    for before, steps, after in launch(3, judged, POOLS):
        assert before == pytest.approx(steps, rel=1e-12) == pytest.approx(expected, rel=1e-12)
        assert after == before


def test_a_judged_loss_of_replicas_that_differ_is_the_mean_of_theirs():
    (one, _, _), (other, _, _) = launch(2, apart)
    by_hand = [launch(1, alone, index)[0] for index in range(2)]
    assert one == other == pytest.approx(sum(by_hand) / 2, rel=1e-12)


def apart(rank: int):
    """Two replicas that have taken a step of their own each."""
    trainer = local.begun(llama(layers=2), "dp2 mb2 sync=local:h=2", TRAIN, local.SETTINGS)
    train, held = held_out(CORPUS, 0.25)
    trainer.step(train.batch(0, rank, 2))
    return Judge(trainer, held).loss(), 0, 0


def alone(rank: int, index: int):
    """The loss of one of them on its share of the rows, in one process that holds that replica alone."""
    from meshwright.plan import parse
    from meshwright.run.data import Batch
    from meshwright.run.mesh import alone as mesh
    from meshwright.run.trainer import Trainer

    share = Train(global_batch=2, seq_len=16, dtype="fp32")
    trainer = Trainer(llama(layers=2), parse("tp1 mb2").on(1), share, mesh(), settings=local.SETTINGS)
    train, held = held_out(CORPUS, 0.25)
    trainer.step(Batch(*train.batch(0, index, 2)))
    losses = []
    still = Trainer(
        llama(layers=2), parse("tp1 mb2").on(1), share, mesh(), settings=Settings(precision="float64", lr=0.0)
    )
    for mine, theirs in zip(still.pieces(), trainer.pieces()):
        mine.values.copy_(theirs.values)
    still.publish()
    for number in range(Judge(trainer, held).batches):
        losses.append(still.step(held.batch(number, index, 2)).loss)
    return sum(losses) / len(losses)


def test_what_is_held_out_is_never_trained_on_and_the_same_for_every_seed():
    train, held = held_out(CORPUS, 0.25)
    assert len(train.tokens) == 1500 and len(held.tokens) == 500
    assert train.starts.tolist() == [0, 700] and held.starts.tolist() == [0, 150]
    with pytest.raises(ValueError, match="held out"):
        held_out(CORPUS, 0.01)


def trained(rank: int, text: str, judges: bool):
    trainer = local.begun(llama(layers=2), text, TRAIN, Settings(precision="float64", lr=1e-2))
    train, held = held_out(CORPUS, 0.25)
    dp = trainer.mesh["dp"]
    judge = Judge(trainer, held)
    losses, seen = [], []
    for step in range(3):
        losses.append(trainer.step(train.batch(step, dp.index, dp.size)).loss)
        if judges:
            seen.append(judge.loss())
    return losses, seen


@pytest.mark.parametrize("text", ["dp2 mb2 fsdp", "dp1 pp2 mb1 1f1b", "dp2 mb1 zero1"])
def test_training_is_the_same_whether_it_is_judged_or_not_and_its_losses_are_those_of_one_process(text):
    (judged_losses, seen), _ = launch(2, trained, text, True)
    (plain, _), _ = launch(2, trained, text, False)
    ((_, alone),) = launch(1, trained, "dp1 mb4", True)
    assert judged_losses == plain
    assert seen == pytest.approx(alone, rel=1e-12)
