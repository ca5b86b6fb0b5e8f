"""Reservoirs of streams: nothing unseen is lost, nobody waits beyond the threshold, and rates are those of sums."""

import pytest

from meshwright.simulate.reservoir import StreamSizes, streamed
from meshwright.world.decider import LogEntry, replayed
from meshwright.world.reservoir import (
    BatchAsked,
    GiveBatch,
    HoldSample,
    KeepSample,
    ProducersEnded,
    ReservoirControl,
    SampleCame,
)


def told(control, events):
    state, log = control.begin(), []
    for event in events:
        state, decisions = control.decide(state, event)
        log.append(LogEntry(event, decisions))
    return log


def test_only_samples_that_were_trained_on_are_overwritten_and_all_are_trained_on_in_the_end():
    control = ReservoirControl(room=20, threshold=5, seed=3)
    events = [event for i in range(60) for event in ([SampleCame(i)] + [BatchAsked(4)] * (i % 3 == 2))]
    events += [ProducersEnded()] + [BatchAsked(4)] * 12
    log = told(control, events)
    trained, kept, held = set(), set(), []
    for entry in log:
        for one in entry.decisions:
            if isinstance(one, GiveBatch):
                assert one.fresh == len(set(one.samples) - trained)
                trained |= set(one.samples)
            elif isinstance(one, KeepSample):
                assert one.dropped < 0 or one.dropped in trained
                kept.add(one.sample)
            elif isinstance(one, HoldSample):
                held.append(one.sample)
    assert trained == kept and len(kept) + len(set(held) - kept) == 60
    assert replayed(control, log) == log


def test_a_producer_waits_where_everything_is_unseen_and_a_batch_where_there_is_too_little():
    log = told(ReservoirControl(room=3, threshold=2), [BatchAsked(2), *map(SampleCame, range(5)), BatchAsked(1)])
    assert [type(one).__name__ for one in log[3].decisions] == ["KeepSample", "GiveBatch"]  # three are more than two
    assert not log[0].decisions and [type(one).__name__ for one in log[2].decisions] == ["KeepSample"]
    assert sum(isinstance(one, HoldSample) for entry in log for one in entry.decisions) == 0
    full = told(ReservoirControl(room=2), [*map(SampleCame, range(3)), BatchAsked(1)])
    assert full[2].decisions == (HoldSample(2),)
    assert isinstance(full[3].decisions[-1], KeepSample)  # the one just trained on makes room


def stream(**said):
    control = ReservoirControl(room=said.pop("room", 300), threshold=said.pop("threshold", 50))
    usual = {"producers": 20, "make_s": 1.0, "send_s": 0.0, "samples": 10, "step_s": 0.1}
    return streamed(StreamSizes(control=control, **(usual | said)))


def test_training_never_waits_beyond_the_threshold_and_repeats_what_there_is():
    found = stream()
    assert found.period_s == pytest.approx(0.1) and found.wait_s == 0
    assert found.first_s == pytest.approx(51 / 20)  # twenty samples a second, and one more than the threshold
    assert found.uses == pytest.approx(5.0, rel=0.02)  # 100 a second are trained on, 20 come
    assert found.fresh == pytest.approx(0.2, rel=0.02) and found.held == 0


def test_producers_that_are_faster_wait_for_room_and_every_sample_is_fresh():
    found = stream(producers=200)
    assert found.period_s == pytest.approx(0.1)
    # of ten that are drawn of 300 one after the other, 4.5 of 300 in the mean are drawn again
    assert found.fresh == pytest.approx(1 - 4.5 / 300, abs=0.004) and found.uses == pytest.approx(1.0, rel=0.03)
    assert found.held == pytest.approx(0.5, abs=0.03)  # 200 a second could come, and 100 are taken


def test_a_link_bounds_what_comes():
    assert stream(producers=200, send_s=0.05).uses == pytest.approx(5.0, rel=0.02)
