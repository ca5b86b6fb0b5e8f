"""The progress of a search in a line: it claims nothing before it can know."""

from time import monotonic

import pytest

from meshwright.search.evaluate import Evaluator
from meshwright.search.progress import line
from meshwright.search.space import default
from meshwright.search.walk import Tried, Walk
from meshwright.spec.cluster import load as cluster
from meshwright.spec.workload import parse
from tests.random_plans import LLAMA

ASKED = LLAMA, cluster("8xh100"), parse("batch=16,seq=1024")


@pytest.mark.parametrize(
    ("seconds", "rejected", "left"),
    [(0.5, 300_000, None), (1.5, 900_000, None), (4.0, 50_000, None), (4.0, 250_000, 12), (4.0, 1_000_000, None)],
)
def test_the_time_left_is_said_once_a_tenth_is_done_and_two_seconds_have_passed(seconds, rejected, left):
    """By hand: a quarter of a million plans in 4 s leaves three quarters for 12 s."""
    walk = Walk(default(*ASKED), Evaluator(*ASKED))
    walk.covered = 1_000_000
    walk.rejected["slower"] = rejected
    walk.started = monotonic() - seconds
    said = line(walk)
    assert ("left" in said) == (left is not None)
    if left is not None:
        assert said.endswith(f", about {left} s left")
    assert "nothing fits" not in said and "best" not in said


def test_what_is_known_of_plans_is_said_once_some_are_evaluated():
    walk = Walk(default(*ASKED), Evaluator(*ASKED), what="a plan to recommend: ")
    walk.covered = 10
    walk.tried[()] = Tried(None, 1.0, -1.0)
    assert line(walk).startswith("a plan to recommend: 1 of 10 plans, 1 evaluated (")
    assert line(walk).endswith("nothing fits yet")


def test_no_time_left_is_said_while_plans_of_the_space_are_still_being_counted():
    walk = Walk(default(*ASKED), Evaluator(*ASKED))
    walk.covers(1_000_000)
    walk.rejected["slower"] = 250_000
    walk.started = monotonic() - 40.0
    assert "left" not in line(walk)
    walk.grown_s -= 3.0
    assert line(walk).endswith(", about 120 s left")
