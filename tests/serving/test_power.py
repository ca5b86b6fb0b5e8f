"""Clocks that follow the power of a row, by hand."""

import pytest

from meshwright import serving
from meshwright.serving.power import FREE, Cap, PowerSeen
from meshwright.world.decider import LogEntry, replayed


def clocks(name, *drawn):
    policy = serving.get("power", name)
    state, given = policy.begin(), []
    for one in drawn:
        state, _ = policy.decide(state, PowerSeen(one))
        given.append(policy.cap(state))
    return given


FIRST, SECOND, BRAKE = Cap(1275 / 1410, 1.0), Cap(1110 / 1410, 1305 / 1410), Cap(288 / 1410, 288 / 1410)


def test_low_priority_is_capped_first_then_everybody_and_caps_go_five_points_below():
    seen = (0.5, 0.81, 0.76, 0.74, 0.90, 0.85, 0.83, 0.99, 1.01, 0.96, 0.94, 0.5)
    given = [FREE, FIRST, FIRST, FREE, SECOND, SECOND, FIRST, SECOND, BRAKE, BRAKE, SECOND, FREE]
    assert clocks("polca", *seen) == given


def test_without_caps_only_the_brake_is_left():
    assert clocks("uncapped", 0.9, 0.999, 1.2, 0.96, 0.9) == [FREE, FREE, BRAKE, BRAKE, FREE]


@pytest.mark.parametrize("name", ["polca", "uncapped"])
def test_a_log_of_caps_replays(name):
    policy, log = serving.get("power", name), []
    state = policy.begin()
    for drawn in (0.7, 0.85, 0.9, 1.1, 0.8, 0.3):
        event = PowerSeen(drawn)
        state, decisions = policy.decide(state, event)
        log.append(LogEntry(event, decisions))
    assert replayed(policy, log) == log
