"""Gradients coded over clients: whole from any that answer but a few, by brute force, and repeated where more miss."""

from itertools import combinations

import numpy as np
import pytest

from meshwright.sync.clients import Answered, Begun, Left, Merge, TrainOn
from meshwright.sync.clients.coded import ATTEMPTS, Coded, parts_of, shares, step_of, weights


@pytest.mark.parametrize(["n", "s"], [(4, 1), (6, 2), (5, 2), (7, 3), (3, 2)])
def test_the_sum_of_all_parts_is_had_whoever_is_missing_and_not_of_fewer(n, s):
    """All patterns of s missing of n; with one more missing none of the cyclic codes has it, and a code of groups has
    it where every group has one left."""
    gradients = np.random.default_rng(n).normal(size=(n, 50))
    sent = weights(n, s) @ gradients
    for client in range(n):
        assert sorted(np.flatnonzero(weights(n, s)[client])) == sorted(parts_of(client, n, s))
    for missing in combinations(range(n), s):
        found = shares(tuple(c for c in range(n) if c not in missing), n, s)
        whole = sum(share * sent[c] for c, share in found.items())
        assert np.abs(whole - gradients.sum(0)).max() < 1e-9 * np.abs(gradients).sum()
    for missing in combinations(range(n), s + 1):
        groups = {c // (s + 1) for c in range(n) if c not in missing}
        had = n % (s + 1) == 0 and len(groups) == n // (s + 1)
        assert (shares(tuple(c for c in range(n) if c not in missing), n, s) is not None) == had


def test_tasks_that_too_many_missed_are_given_again_to_those_before_the_next_step():
    decider = Coded(num_clients=5, extra=1)
    state, given = decider.decide(decider.begin(), Begun())
    assert given == tuple(TrainOn(client, 0, 1) for client in range(5))

    def told(event):
        nonlocal state
        state, decided = decider.decide(state, event)
        return decided

    def answered(client, task):
        return told(Answered(client, task, 0, 1, 0.0, 1.0))

    assert [answered(c, 0) for c in (0, 1)] == [(), ()] and told(Left(2, 0, 1.0)) == () == answered(4, 0)
    again = told(Left(3, 0, 1.0))
    assert again == (TrainOn(2, 1, 1), TrainOn(3, 1, 1)) and step_of(1) == 0
    merged, *begun = answered(3, 1)
    assert isinstance(merged, Merge) and merged.steps == 5 and [p.task for p in merged.parts] == [0, 0, 1, 0]
    assert begun == [TrainOn(client, ATTEMPTS, 1) for client in range(5)]
    assert answered(2, 1) == ()  # too late
