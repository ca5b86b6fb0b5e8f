"""Deciders of what a job beside requests gets, by hand."""

from meshwright import serving
from meshwright.serving.sharing import JobShare, Observed
from meshwright.world.decider import LogEntry, replayed

MUXFLOW = serving.get("sharing", "muxflow")


def told(policy, *events):
    state, given = policy.begin(), []
    for needed, slowdown in events:
        state, decisions = policy.decide(state, Observed(needed, slowdown))
        given.append((policy.share(state), decisions))
    return state, given


def test_the_job_has_the_complement_of_the_peak_in_whole_steps():
    _, given = told(MUXFLOW, *[(0.1, 1.0)] * 4, (0.33, 1.0), *[(0.1, 1.0)] * 5)
    # nothing is known before five observations; 1 - 0.33 is 13 steps of 0.05, until the 0.33 is out of sight
    assert [share for share, _ in given] == [0.0] * 4 + [0.65] * 5 + [0.9]
    assert given[4][1] == (JobShare(0.65),) and given[5][1] == ()


def test_over_the_limit_the_share_is_halved_until_the_job_leaves_longer_each_time():
    calm, over = (0.0, 1.0), (0.0, 1.3)
    state, given = told(MUXFLOW, *[calm] * 5, *[over] * 5)
    assert [share for share, _ in given[4:]] == [0.95, 0.45, 0.2, 0.1, 0.05, 0.0]
    assert (state.evicted, state.off) == (1, 5)
    state, given = told(MUXFLOW, *[calm] * 5, *[over] * 5, *[calm] * 6, over)
    # five observations off the device, then the least share; off again, and for ten
    assert [share for share, _ in given[10:]] == [0.0] * 5 + [0.05, 0.0]
    assert (state.evicted, state.off) == (2, 10)


def test_a_log_of_decisions_replays():
    events = [Observed(0.2), *[Observed(0.2, 1.5)] * 7, *[Observed(0.4)] * 9]
    state, log = MUXFLOW.begin(), []
    for event in events:
        state, decisions = MUXFLOW.decide(state, event)
        log.append(LogEntry(event, decisions))
    assert replayed(MUXFLOW, log) == log


def test_a_fixed_share_does_not_move():
    policy = serving.get("sharing", "fixed-share:0.3")
    assert [share for share, _ in told(policy, (1.0, 3.0), (0.0, 1.0))[1]] == [0.3, 0.3]
