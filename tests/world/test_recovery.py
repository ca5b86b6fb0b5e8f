"""Decisions of a job when nodes fail, without a clock; a log replays to the same decisions."""

import pytest

from meshwright.world.decider import LogEntry, replayed
from meshwright.world.recovery import (
    Began,
    Ended,
    Failed,
    Finish,
    Recovery,
    Repaired,
    Restart,
    Restarted,
    TrainFrom,
    Wait,
)


def told(decider, *events):
    """The decisions that a series of events leads to."""
    state, out = decider.begin(), []
    for event in events:
        state, decisions = decider.decide(state, event)
        out.append(decisions)
    return out


def test_a_job_trains_from_its_last_checkpoint_after_a_failure():
    found = told(Recovery(save_every=10), Began(), Failed(30), Restarted(), Ended())
    assert found == [(TrainFrom(0, 10),), (Restart(),), (TrainFrom(30, 10),), (Finish(),)]


def test_a_job_waits_when_more_nodes_are_in_repair_than_it_has_spares():
    found = told(
        Recovery(save_every=10, spares=1), Began(), Failed(10), Restarted(), Failed(20), Repaired(), Restarted()
    )
    assert found[1:] == [(Restart(),), (TrainFrom(10, 10),), (Wait(),), (Restart(),), (TrainFrom(20, 10),)]


def test_a_repair_that_nobody_waits_for_changes_nothing_but_the_spares():
    decider = Recovery(save_every=10, spares=1)
    found = told(decider, Began(), Failed(0), Restarted(), Repaired(), Failed(10))
    assert found[3] == ()
    assert found[4] == (Restart(),)  # the node that was repaired is the spare


def test_a_restart_can_fail_too():
    assert told(Recovery(save_every=5), Began(), Failed(5), Failed(5), Restarted())[-1] == (TrainFrom(5, 5),)


@pytest.mark.parametrize("spares", [None, 0, 2])
def test_a_log_replays_to_the_same_decisions(spares):
    decider = Recovery(save_every=7, spares=spares)
    events = [Began(), Failed(7), Repaired(), Restarted(), Failed(21), Failed(21), Repaired(), Repaired(), Restarted()]
    state, log = decider.begin(), []
    for event in events:
        state, decisions = decider.decide(state, event)
        log.append(LogEntry(event, decisions))
    assert replayed(decider, log) == log
