"""The figures of choices among measured plans, by hand."""

import pytest

from meshwright.validate.choices import choices
from meshwright.validate.score import Scored


def row(i, predicted, measured, p_fit=1.0, oom=False):
    time = None if oom else (measured, predicted)
    return Scored(id=str(i), key="a/b", group=("g",), time=time, oom=(oom, False), p_fit=p_fit, predicted_s=predicted)


ROWS = [row(0, 1.0, 1.2), row(1, 1.1, 1.0), row(2, 1.2, 1.32), row(3, 1.3, 1.3), row(4, 0.9, 0, 0.7, oom=True)]


def test_the_plan_taken_is_the_fastest_that_fits_at_the_risk():
    # row 4 is predicted fastest and fits with 70%: at 5% row 0 is taken, 20% slower than row 1
    found = choices(ROWS)
    assert (found["groups"], found["chosen"], found["ran"]) == (1, 1, 1.0)
    assert found["regret_mean"] == pytest.approx(0.2)
    assert choices(ROWS, risk=0.4)["ran"] == 0.0


def test_a_choice_that_came_out_slower_than_its_group_shows_the_winner_s_curse():
    # the taken one 20% over its prediction; the four on average by exp of (log 1.2 + log 1/1.1 + log 1.1 + 0) / 4
    assert choices(ROWS)["winners_curse"] == pytest.approx(0.1823 * 3 / 4, abs=1e-4)
    exact = [row(i, 1 + 0.1 * i, 1 + 0.1 * i) for i in range(5)]
    found = choices(exact)
    assert (found["winners_curse"], found["gain_realised"]) == pytest.approx((0.0, 1.0))


def test_small_groups_and_groups_where_nothing_ran_are_no_choices():
    assert choices(ROWS[:4]) == {}
    assert choices([row(i, 1.0, 0, oom=True) for i in range(6)]) == {}
