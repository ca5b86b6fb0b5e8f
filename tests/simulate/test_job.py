"""A training job over days: against hand calculations, a step-by-step reference, and Daly's mean."""

from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import causes
from meshwright.errors import MeshwrightError
from meshwright.simulate.job import JobSizes, Stretch, expected_s, run_job
from meshwright.world.decider import replayed
from meshwright.world.recovery import Recovery
from meshwright.world.trace import JobWorld, WorldEvent, changes

JOB = JobSizes(num_steps=100, step_s=10.0, save_s=5.0, restart_s=60.0, repair_s=1000.0)


def ran(job=JOB, every=10, spares=None, world=()):
    return run_job(job, Recovery(save_every=every, spares=spares), iter(world))


def test_without_failures_a_job_takes_its_steps_and_its_checkpoints():
    found = ran()
    assert found.seconds == 100 * 10 + 10 * 5
    assert found.by_cause == {"steps": 1000.0, "checkpoints": 50.0, "lost": 0.0, "restarts": 0.0, "waiting": 0.0}
    assert ran(every=30).by_cause["checkpoints"] == 4 * 5  # after 30, 60, 90 and 100 steps


def test_a_failure_takes_back_what_was_done_since_the_last_checkpoint():
    # checkpoints are complete at 105, 210, ...; at 250 s the 40 s since 210 are lost, and 60 s pass until it goes on
    found = ran(world=[WorldEvent(250.0)])
    assert found.seconds == 1050 + 40 + 60
    assert found.by_cause == {"steps": 1000.0, "checkpoints": 50.0, "lost": 40.0, "restarts": 60.0, "waiting": 0.0}


def test_a_checkpoint_that_a_failure_interrupts_does_not_count():
    found = ran(world=[WorldEvent(104.0)])
    assert found.by_cause["lost"] == 104.0
    assert ran(world=[WorldEvent(105.0)]).by_cause["lost"] == 0.0


def test_a_restart_that_fails_begins_anew():
    assert ran(world=[WorldEvent(210.0), WorldEvent(250.0)]).by_cause["restarts"] == 40 + 60


def test_without_a_spare_the_job_waits_for_the_repair():
    # fails at 210, repaired at 1210, restarted at 1270
    found = ran(spares=0, world=[WorldEvent(210.0)])
    assert found.by_cause["waiting"] == 1000.0
    assert found.seconds == 1050 + 1000 + 60
    # a spare stands in for the first; the second waits until the first is back at 1210
    found = ran(spares=1, world=[WorldEvent(210.0), WorldEvent(270.0)])
    assert found.by_cause["waiting"] == 1210 - 270


def test_slow_times_stretch_steps_and_not_checkpoints():
    # from 50 s to 80 s at half speed: 1.5 of the steps; 98.5 of them at full speed
    found = ran(world=[WorldEvent(50.0, 2.0), WorldEvent(80.0, 1.0)])
    assert found.seconds == pytest.approx(1050 + 15)
    assert ran(world=[WorldEvent(0.0, 3.0)]).seconds == 3 * 1000 + 50
    # slow while a checkpoint is written, 100 s to 105 s: nothing is stretched
    assert ran(world=[WorldEvent(100.0, 9.0), WorldEvent(105.0, 1.0)]).seconds == pytest.approx(1050)


def reference(job: JobSizes, every: int, failures: list[float]) -> float:
    """Seconds of the job step by step: a slow and readable second way, with a spare for every node."""
    now, saved, pending = 0.0, 0, [*failures, inf]
    while saved < job.num_steps:
        until = min(saved + every, job.num_steps)
        for length in [job.step_s] * (until - saved) + [job.save_s]:
            if now + length > pending[0]:
                now = pending.pop(0)
                while now + job.restart_s > pending[0]:
                    now = pending.pop(0)
                now += job.restart_s
                break
            now += length
        else:
            saved = until
    return now


@given(
    st.integers(1, 60),
    st.integers(1, 70),
    st.lists(st.floats(0.01, 3000).map(lambda x: round(x, 3) + 0.0001), max_size=8),
    st.sampled_from([0.0, 1.0, 7.5]),
)
def test_a_job_is_what_a_step_by_step_loop_makes_of_it(steps, every, failures, save_s):
    job = JobSizes(num_steps=steps, step_s=7.0, save_s=save_s, restart_s=33.0, repair_s=50.0)
    failures = sorted(set(failures))
    found = ran(job, every, world=[WorldEvent(at) for at in failures])
    assert found.seconds == pytest.approx(reference(job, min(every, steps), failures))
    assert sum(found.by_cause.values()) == pytest.approx(found.seconds)
    assert found.by_cause["steps"] == pytest.approx(steps * 7.0)
    assert found.by_cause["checkpoints"] == pytest.approx(ceil(steps / min(every, steps)) * save_s)
    assert set(found.by_cause) == {cause.name for cause in causes.JOB}


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 1), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_place_in_a_stretch_and_its_time_are_inverse(steps, every, share, slowdown):
    stretch = Stretch(JOB, steps, min(every, steps))
    place = share * stretch.end_s
    assert stretch.place_at(stretch.elapsed_s(place, slowdown), slowdown) == pytest.approx(place, abs=1e-6)


@pytest.mark.parametrize(("mtbf_s", "every"), [(7200.0, 27), (900.0, 10), (86_400.0, 300)])
def test_the_mean_over_draws_is_dalys(mtbf_s, every):
    # 600 draws with a fixed seed: within three standard errors of the closed form (Daly, 2006)
    job = JobSizes(num_steps=5000, step_s=10.0, save_s=5.0, restart_s=300.0, repair_s=0.0)
    decider, world = Recovery(save_every=every), JobWorld(seed=11)
    drawn = np.array([run_job(job, decider, changes(world, mtbf_s, i)).seconds for i in range(600)])
    error = drawn.std(ddof=1) / np.sqrt(len(drawn))
    assert abs(drawn.mean() - expected_s(job, every, mtbf_s)) < 3 * error
    assert error < 0.02 * drawn.mean()


def test_the_log_of_a_job_replays():
    decider = Recovery(save_every=10, spares=1)
    found = run_job(JOB, decider, changes(JobWorld(seed=2), 400.0, 0))
    assert found.failures >= 2
    assert replayed(decider, found.log) == list(found.log)


def test_a_job_that_never_reaches_its_next_checkpoint_is_refused():
    with pytest.raises(MeshwrightError, match="O003"):
        run_job(JOB, Recovery(save_every=100), changes(JobWorld(), 20.0, 0))


def test_a_job_whose_steps_are_far_longer_than_the_time_between_failures_never_ends():
    # e^t/M with t/M of a thousand is beyond every number; at a hundred it is e^100 - 1 = 2.7e43 seconds
    job = JobSizes(num_steps=3, step_s=1000.0, save_s=0.0, restart_s=0.0, repair_s=0.0)
    assert expected_s(job, 1, 1.0) == float("inf")
    assert expected_s(job, 1, 10.0) == pytest.approx(3 * 10.0 * 2.6881171418161356e43)


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(5.0, 7200.0), (60.0, 20_000.0), (2.0, 900.0)])
def test_youngs_interval_is_as_good_as_the_best_of_all(save_s, mtbf_s):
    """sqrt(2 d M) (Young, 1974) against every other interval, in the mean over drawn failures and in closed form."""
    job = JobSizes(num_steps=4000, step_s=1.0, save_s=save_s, restart_s=30.0, repair_s=0.0)
    young = round((2 * save_s * mtbf_s) ** 0.5)
    best = min(expected_s(job, every, mtbf_s) for every in range(1, 4000, 7))
    assert expected_s(job, young, mtbf_s) <= 1.01 * best
    means = {
        every: np.mean(
            [run_job(job, Recovery(save_every=every), changes(JobWorld(seed=2), mtbf_s, d)).seconds for d in range(60)]
        )
        for every in (young // 6, young, young * 6)
    }
    assert means[young] == min(means.values())
