"""Rollouts and training steps on one clock: steps by hand, and two ways to simulate the same job."""

import numpy as np
import pytest

from meshwright import serving
from meshwright.answer.replica import served_by
from meshwright.simulate.rollouts import Flow, RolloutJob, in_waves
from meshwright.spec.requests import Requests
from meshwright.spec.serve import parse
from meshwright.world.decider import replayed
from meshwright.world.rollouts import RolloutControl
from tests.serving.costs import linear_costs, replica

SERVE = parse("batch=1,prompt=8,output=5")
ROUTER = serving.get("routing", "round-robin")


def job(control, *, trains, loads, steps=6, samples=1, output=5, prompt=8):
    """A job whose training steps take so many seconds, with answers of as many tokens, or of those given in turn."""
    count = (steps + control.bound + 1) * control.batch * samples
    answers = np.resize(np.atleast_1d(output), count).astype(np.int64)
    asked = Requests(arrival_s=np.zeros(count), prompt=np.full(count, prompt), output=answers)
    return RolloutJob(
        control=control, steps=steps, samples=samples, requests=asked, train_s=lambda tokens: trains, load_s=loads
    )


def waves(asked, one, count=2):
    return in_waves(asked, lambda wave: served_by(SERVE, one, wave, count))


def periods(out):
    return np.diff([step.end_s for step in out.steps]).tolist()


def test_a_synchronous_step_is_generation_training_and_new_parameters():
    # an iteration takes 1 s: an answer of 5 tokens takes 5 s, however many are generated at a time
    out = waves(job(RolloutControl(batch=4, waves=True), trains=3.0, loads=0.5), replica())
    assert out.steps[0].end_s == pytest.approx(5 + 3)
    assert periods(out) == pytest.approx([5 + 3 + 0.5] * 5)
    assert {age for step in out.steps for age in step.stale} == {0}
    assert out.steps[-1].generating_s == pytest.approx(6 * 2 * 5)  # two replicas, six waves


def test_a_synchronous_step_waits_for_its_longest_answer():
    out = waves(job(RolloutControl(batch=4, waves=True), trains=3.0, loads=0.5, output=[2, 2, 2, 9]), replica())
    assert periods(out) == pytest.approx([9 + 3 + 0.5] * 5)
    # answers go to the two replicas in turn: one generates for 2 s, the other for 9 s
    assert out.steps[0].generating_s == pytest.approx(2 + 9)


@pytest.mark.parametrize("trains", [3.0, 9.0])
def test_a_step_apart_takes_what_takes_longer_and_new_parameters(trains):
    control = RolloutControl(batch=4, bound=1, waves=True, interrupts=False)
    out = waves(job(control, trains=trains, loads=0.5), replica())
    assert periods(out)[1:] == pytest.approx([max(5, trains) + 0.5] * 4)
    assert [set(step.stale) for step in out.steps] == [{0}, {1}, {1}, {1}, {1}, {1}]


def test_generation_that_never_waits_takes_what_the_slower_side_does():
    control = RolloutControl(batch=8, bound=3, room=4)
    one = replica(max_batch=4)
    slow = Flow(job(control, trains=30.0, loads=0.5, steps=8), one, 1, ROUTER).run()
    assert periods(slow)[3:] == pytest.approx([30 + 0.5] * 4)  # training all the time
    # one replica generates 4 answers in 5 s, the 8 of a step in 10 s; new parameters take 3 s from when the iteration
    # of 1 s begins behind whose end they are waited for, and the iteration after them computes the cache and goes on
    fast = Flow(job(control, trains=1.0, loads=3.0, steps=8), one, 1, ROUTER).run()
    assert periods(fast)[3:] == pytest.approx([10 + (3 - 1)] * 4)
    assert all(age <= 3 for step in (*slow.steps, *fast.steps) for age in step.stale)


def test_a_bound_of_nothing_is_the_synchronous_job():
    answers = np.random.default_rng(0).integers(2, 40, 4 * 7 * 3)
    sync = waves(job(RolloutControl(batch=4, waves=True), trains=3.0, loads=2.0, samples=3, output=answers), replica())
    flow = Flow(job(RolloutControl(batch=4), trains=3.0, loads=2.0, samples=3, output=answers), replica(), 2, ROUTER)
    found = flow.run()
    assert [step.end_s for step in found.steps] == pytest.approx([step.end_s for step in sync.steps])
    assert found.interrupted == 0
    for ours, theirs in zip(found.steps, sync.steps):
        assert (ours.tokens, ours.answered) == (theirs.tokens, theirs.answered)
        assert ours.generating_s == pytest.approx(theirs.generating_s)


def test_interrupted_answers_go_on_where_they_stood_and_their_caches_are_computed_again():
    # a token computed takes 1 s: group 0 has 1 token behind its prompt of 8, group 1 has 30
    asked = job(RolloutControl(batch=1, bound=1), trains=4.0, loads=1.0, steps=2, output=[1, 30], prompt=8)
    out = Flow(asked, replica(costs=linear_costs(token=1.0)), 1, ROUTER).run()
    # 16 tokens of two prompts take 16 s; group 0 has ended, and is trained on until 20, when group 1 has 5 tokens, all
    # but the last of which are computed
    assert out.steps[0].end_s == pytest.approx(16 + 4)
    assert (out.interrupted, out.recomputed) == (1, 8 + 4)
    # parameters are loaded at 21, and 13 tokens computed, the sixth token; group 2, which was asked for at 21, is 8
    # tokens beside the next one, and 23 tokens follow that
    assert out.steps[1].begin_s == pytest.approx(21 + 13 + (1 + 8) + 23)


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_long_tailed_answers_are_trained_on_once_within_the_bound_and_the_log_replays(bound, interrupts):
    answers = np.random.default_rng(1).lognormal(3.0, 1.0, 16 * 4 * 2).astype(np.int64) + 1
    control = RolloutControl(batch=4, bound=bound, interrupts=interrupts, room=16)
    asked = job(control, trains=15.0, loads=2.0, steps=8, samples=2, output=answers)
    out = Flow(asked, replica(costs=linear_costs(base=0.1, token=0.01), max_batch=16), 2, ROUTER).run()
    assert max(age for step in out.steps for age in step.stale) <= bound
    assert out.asked == 4 * len(out.steps) + out.left
    assert bool(out.interrupted) == interrupts
    assert replayed(control, out.log) == list(out.log)
    assert sum(step.tokens for step in out.steps) - sum(step.answered for step in out.steps) == 8 * 8 * 4 * 2
