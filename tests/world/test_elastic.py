"""Decisions of an elastic job when nodes are lost and come back, without a clock."""

import pytest

from meshwright.world.decider import LogEntry, replayed
from meshwright.world.elastic import NEWEST, Elastic, Regroup
from meshwright.world.recovery import Began, Ended, Failed, Finish, Repaired, Restarted, TrainFrom, Wait
from tests.world.test_recovery import told


def test_a_spare_takes_the_place_of_a_lost_node_and_the_job_goes_on_where_it_was():
    found = told(Elastic(sizes=(1, 2, 4)), Began(), Failed(7), Restarted(), Ended())
    assert found == [(TrainFrom(NEWEST, 1),), (Regroup(4),), (TrainFrom(NEWEST, 1),), (Finish(),)]


def test_without_a_spare_the_job_goes_on_under_the_largest_plan_for_those_that_are_left_and_grows_again():
    found = told(Elastic(sizes=(2, 4), spares=0), Began(), Failed(7), Restarted(), Failed(9), Repaired(), Repaired())
    # three nodes are left, then two; both have the plan for two, and the third changes nothing
    assert found[1:] == [(Regroup(2),), (TrainFrom(NEWEST, 1),), (Regroup(2),), (), (Regroup(4),)]


def test_with_too_few_nodes_for_any_plan_the_job_waits():
    found = told(Elastic(sizes=(2,), spares=0), Began(), Failed(3), Repaired())
    assert found[1:] == [(Wait(),), (Regroup(2),)]


@pytest.mark.parametrize("spares", [None, 0, 1])
def test_its_log_replays(spares):
    decider = Elastic(sizes=(2, 3, 4), spares=spares)
    state, log = decider.begin(), []
    for event in (Began(), Failed(1), Restarted(), Failed(2), Failed(2), Repaired(), Restarted(), Repaired(), Ended()):
        state, decisions = decider.decide(state, event)
        log.append(LogEntry(event, decisions))
    assert replayed(decider, log) == log
