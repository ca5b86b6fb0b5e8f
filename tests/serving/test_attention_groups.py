"""Prompts of attention groups that wait for one another, by hand: iterations of a second each, and two groups."""

import msgspec
import numpy as np
import pytest

from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import served_alone
from tests.serving.costs import linear_costs, requests
from tests.serving.test_gate import gated


def scheduled(one, asked):
    """When requests are let in, after asserting that the loop of events says the same as the compiled one."""
    fast, plain = simulate(one, asked), served_alone(one, asked, skips=False)
    assert fast.scheduled_s.tolist() == plain.scheduled_s.tolist() and fast.end_s == pytest.approx(plain.end_s)
    assert served_alone(one, asked).scheduled_s.tolist() == plain.scheduled_s.tolist()
    return fast.scheduled_s.tolist()


LONG, SHORT = (0.0, 8, 40), (0.0, 8, 3)


def test_two_prompts_of_one_group_wait_for_the_other_group_until_time_is_up():
    # three answers in each group, in turn. Two of the second group end at 3 s, and its places are taken at 3.5 s: two
    # prompts wait for two groups, and the first group has none. Six iterations after the last time it is 6 s
    asked = requests(LONG, LONG, LONG, SHORT, LONG, SHORT, (3.5, 8, 9), (3.5, 8, 9))
    assert scheduled(gated(batch_wait=6, groups=2), asked) == [0.0] * 6 + [6.0, 6.0]


def test_they_go_as_soon_as_the_other_group_has_one():
    # as before, and an answer of the first group ends at 5 s: who comes at 5.5 s is of that group
    asked = requests((0.0, 8, 5), LONG, LONG, SHORT, LONG, SHORT, (3.5, 8, 9), (3.5, 8, 9), (5.5, 8, 9))
    assert scheduled(gated(batch_wait=60, groups=2), asked) == [0.0] * 6 + [6.0] * 3


def test_iterations_of_a_full_batch_count_as_waiting():
    # three answers at most, of which one ends at 5 s: who waits since 1.5 s is let in seven iterations after the last
    # prompts, as the other group has none
    asked = requests(LONG, LONG, (0.0, 8, 5), (1.5, 8, 9))
    assert scheduled(gated(batch_wait=7, groups=2, max_batch=3), asked) == [0.0] * 3 + [7.0]


def test_prompts_that_wait_for_more_do_so_longer_than_for_the_other_groups():
    # both groups have a prompt at 2 s, and these wait five iterations more, though not three for another group's
    asked = requests(LONG, LONG, (1.5, 8, 9), (1.5, 8, 9))
    assert scheduled(gated(batch_wait=3, groups=2, settle=5), asked) == [0.0, 0.0, 7.0, 7.0]


def test_nobody_waits_for_a_group_in_which_nobody_runs():
    # the second group's only answer ends at 3 s; its next prompt is computed at once
    asked = requests((0.0, 8, 30), (0.0, 8, 3), (3.5, 8, 9))
    assert scheduled(gated(batch_wait=50, groups=2), asked) == [0.0, 0.0, 4.0]


def test_a_group_has_room_for_its_part_of_the_budget_alone():
    # 50 of 100 tokens each: the first and the third prompt are of one group, and 40 + 40 are too many. The other group
    # has none by then, so that the third waits three iterations
    asked = requests((0.0, 40, 20), (0.0, 40, 20), (0.0, 40, 20))
    assert scheduled(gated(batch_wait=3, groups=2, budget=100), asked) == [0.0, 0.0, 3.0]


def test_a_request_goes_to_the_group_with_the_fewest_tokens_of_those_that_are_not_full():
    # groups of 100 and 8 tokens; a third prompt goes to the second. The fourth goes to the first, which has one request
    # less, and both go together at 3 s
    asked = requests((0.0, 100, 30), (0.0, 8, 30), (1.5, 8, 3), (2.5, 8, 3))
    assert scheduled(gated(batch_wait=50, groups=2), asked) == [0.0, 0.0, 3.0, 3.0]


def test_an_iteration_takes_as_long_as_that_of_the_group_with_most():
    # groups of two prompts and one, of 8 tokens each: a second, 24 ms for 24 tokens, 0.1 s for each of the 4 tokens by
    # which the first has more than the mean of 12, and attention as if each had two: 4 * 8 ms. Next tokens are as many
    # as if each group had two: a second, 4 ms, and 2 ms of attention behind 9 tokens on average, then 10
    costs = linear_costs(base=1.0, token=1e-3, prefill=1e-3, decode=1e-3 / 18)
    costs = msgspec.structs.replace(costs, own_s=0.1 * np.arange(100.0))
    one = gated(batch_wait=9, groups=2, costs=costs, budget=100)
    asked = requests((0.0, 8, 3), (0.0, 8, 3), (0.0, 8, 3))
    fast, plain = simulate(one, asked), served_alone(one, asked, skips=False)
    assert fast.first_s == pytest.approx(plain.first_s) and fast.first_s.tolist() == pytest.approx([1.456] * 3)
    end = pytest.approx([1.456 + 1.006 + 1.004 + 4 / 1800] * 3)
    assert fast.end_s.tolist() == end and plain.end_s.tolist() == end
