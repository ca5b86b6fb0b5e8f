"""Rollout control without a clock: nothing is too old or lost, and nothing stands still."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.world.decider import LogEntry, replayed
from meshwright.world.rollouts import (
    AskGroups,
    GroupsEnded,
    LoadParameters,
    ParametersLoaded,
    RolloutControl,
    StepTrained,
    TrainGroups,
)
from tests.world.test_recovery import told


def driven(control, choose, steps):
    """Tell a control what may happen next, in an order that `choose` picks, until so many steps are trained; returns
    its log, what was asked for by version, and what was trained on."""
    state, log, asked, trained = control.begin(), [], {}, []
    open_, training, loading, version, loaded, done = [], False, True, 0, 0, 0
    while done < steps:
        events = [GroupsEnded((group,)) for group in open_]
        events += [StepTrained()] * training + [ParametersLoaded()] * loading
        assert events, "everything waits for everything"
        event = choose(events)
        if isinstance(event, GroupsEnded):
            open_.remove(event.groups[0])
        elif isinstance(event, StepTrained):
            training, done = False, done + 1
        else:
            loading, version = False, loaded
        state, decisions = control.decide(state, event)
        log.append(LogEntry(event, decisions))
        for decision in decisions:
            if isinstance(decision, AskGroups):
                new = range(decision.first, decision.first + decision.count)
                open_ += new
                asked |= dict.fromkeys(new, version)
            elif isinstance(decision, TrainGroups):
                assert not training
                training = True
                trained.append(decision)
            else:
                assert isinstance(decision, LoadParameters) and not loading
                loading, loaded = True, done
    return log, asked, trained


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        RolloutControl,
        batch=st.integers(1, 4),
        bound=st.integers(0, 4),
        waves=st.booleans(),
        interrupts=st.booleans(),
        room=st.integers(0, 6),
    ),
    st.integers(0, 2**32),
)
def test_whatever_comes_first_no_group_is_older_than_the_bound_and_each_is_trained_on_once(control, seed):
    log, asked, trained = driven(control, Random(seed).choice, steps=8)
    for version, step in enumerate(trained):
        assert len(step.groups) == control.batch
        assert step.stale == tuple(version - asked[group] for group in step.groups)
        assert all(0 <= age <= control.bound for age in step.stale)
    taken = [group for step in trained for group in step.groups]
    assert len(taken) == len(set(taken)) and set(taken) <= asked.keys()
    for version in set(asked.values()):  # AReaL's inequality (3), of the last group that a version asked for
        last = max(group for group, head in asked.items() if head <= version)
        assert last // control.batch <= version + control.bound
    assert replayed(control, log) == log


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_a_step_apart_every_group_is_exactly_one_version_old_whatever_comes_first(batch, seed):
    control = RolloutControl(batch=batch, bound=1, waves=True, interrupts=False)
    _, _, trained = driven(control, Random(seed).choice, steps=6)
    for version, step in enumerate(trained):
        assert step.stale == ((min(version, 1),) * batch)
        assert step.groups == tuple(range(version * batch, (version + 1) * batch))


def test_a_step_waits_for_an_old_group_that_others_overtake():
    control = RolloutControl(batch=1, bound=1)
    # groups 0 and 1 are of version 0; group 2, of version 1, ends before group 1, which step 1 is the last to take
    found = told(control, ParametersLoaded(), GroupsEnded((0,)), StepTrained(), ParametersLoaded(), GroupsEnded((2,)))
    assert found == [
        (AskGroups(0, 2),),
        (TrainGroups((0,), (0,)),),
        (LoadParameters(),),
        (AskGroups(2, 1),),
        (),
    ]
    found = told(
        control, *([ParametersLoaded(), GroupsEnded((0,)), StepTrained(), ParametersLoaded()]), GroupsEnded((2, 1))
    )
    assert found[-1] == (TrainGroups((1,), (1,)),)


def test_with_a_version_more_a_step_goes_on_with_the_group_that_overtook():
    control = RolloutControl(batch=1, bound=2)
    found = told(
        control,
        ParametersLoaded(),
        GroupsEnded((0,)),
        StepTrained(),
        ParametersLoaded(),
        GroupsEnded((1,)),
        StepTrained(),
        ParametersLoaded(),
        GroupsEnded((3,)),
    )
    # groups 0 to 2 are of version 0: step 2 is the last to take group 2, and waits for it
    assert found[0] == (AskGroups(0, 3),) and found[4] == (TrainGroups((1,), (1,)),) and found[-1] == ()


@pytest.mark.parametrize("interrupts", [True, False])
def test_parameters_are_loaded_at_once_or_when_no_answer_is_under_way(interrupts):
    control = RolloutControl(batch=1, bound=1, interrupts=interrupts)
    found = told(control, ParametersLoaded(), GroupsEnded((0,)), StepTrained(), GroupsEnded((1,)), ParametersLoaded())
    loads = [LoadParameters() in decisions for decisions in found]
    assert loads == [False, False, interrupts, not interrupts, False]
    # the groups behind it are of the version that is loaded, and asked for when it is
    assert found[-1] == (AskGroups(2, 1),)
