"""The search against brute force, over all that a search is asked about: models, profiles, and every facet."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.search.evaluate import Evaluator
from meshwright.search.settle import settled
from meshwright.search.strategies import exhaustive
from tests.search.small import compared, everything, walk_of
from tests.search.wide import wide_questions

#: Plans that brute force evaluates at most.
MOST = 120


@given(wide_questions(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_no_bound_exceeds_what_it_bounds_whatever_is_asked(asked, seed):
    question, costs = asked
    for one in compared(question, costs, rng=np.random.default_rng(seed), regions=2, plans=6):
        assert not one.over(), one.plan.text()


@given(wide_questions(most=MOST))
@settings(max_examples=25)
def test_the_best_of_any_space_is_that_of_brute_force(asked):
    question, costs = asked
    walk = walk_of(question, costs=costs)
    assert exhaustive.run(walk)
    evaluator = Evaluator(*question[:3], costs)
    points = list(everything(question[3], *question[:3]))
    answers = [evaluator(settled(*point, evaluator)) for point in points]
    fitting, best = [a.step_time_s for a in answers if a.fits], walk.fitting()
    assert [t.step_time_s for t in best[:1]] == sorted(fitting)[:1]
    assert walk.covered == len(points)
