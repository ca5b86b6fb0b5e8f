"""Rounds that grow as the learning rate falls, against the rule written out."""

from itertools import pairwise
from math import cos, floor, pi

import pytest

from meshwright.sync.growing import GrowingRounds
from meshwright.sync.policy import read
from meshwright.sync.rounds import begun, ended, since_due


def test_a_constant_rate_has_rounds_of_one_length():
    """(0.3001 / 0.1)^2 is 9 steps and a little; the last round ends with the run."""
    growth = GrowingRounds(least=4, growth=0.3001, peak=0.1, steps=30, floor=1.0)
    assert growth.ends == (9, 18, 27, 30)
    assert growth.mean == 7.5


def test_no_round_is_shorter_than_the_least():
    assert GrowingRounds(least=4, growth=1e-3, peak=0.1, steps=12, floor=1.0).ends == (4, 8, 12)


def test_lengths_are_the_squares_of_the_paper_s_rule_at_each_round_s_beginning():
    """H = max(h, floor((growth / rate)^2)) with the rates of a cosine to 0 (Gu et al. 2310.14423, equation 2)."""
    growth = GrowingRounds(least=4, growth=0.0175, peak=0.008, steps=5000)
    for begin, end in pairwise((0, *growth.ends[:-1])):
        rate = 0.008 * 0.5 * (1 + cos(pi * begin / 5000))
        assert end - begin == max(4, floor((0.0175 / rate) ** 2))
    assert growth.ends[-1] == 5000
    assert growth.ends[0] == 4  # (0.0175 / 0.008)^2 = 4.8


def test_rounds_of_the_warm_up_are_those_of_the_step_after_it():
    """The rate is 0.1 after it: 9 steps, where the warm-up's own rates would make thousands."""
    growth = GrowingRounds(least=1, growth=0.3001, peak=0.1, steps=100, warmup=50, floor=1.0)
    assert growth.ends[:4] == (9, 18, 27, 36)


@pytest.mark.parametrize("text", ["local:h=3", "qsr:h=1,growth=1.5,rate=1,steps=40,falls=linear"])
def test_what_is_due_has_ended_and_has_been_counted(text):
    policy = read(text)
    counted = 0
    for step in range(1, 41):
        due = since_due(policy, 0, step) == 0
        counted += due
        assert ended(policy, step) == due
        assert begun(policy, 0, step) == counted


def test_a_policy_is_read_back_from_its_text_and_spaces_its_exchanges_as_its_rounds_do():
    policy = read("qsr:h=4,growth=0.0175,rate=0.008,steps=1000")
    assert read(policy.text) == policy
    assert policy.spacing == 1000 / len(policy.growth.ends)
    assert "4 steps or more" in str(policy)
