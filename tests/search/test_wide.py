"""The search against brute force, over all that a search is asked about: models, profiles, and every facet."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from meshwright.plan.facets.layout import DEFAULT_ORDER
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


def once(found):
    """Step times of (plan, step time, headroom), ascending, without those of plans that differ in the order of their
    axes alone: the search writes a plan once whose groups lie the same under several orders."""
    plain = {(replace(plan, layout=replace(plan.layout, order=DEFAULT_ORDER)), *said) for plan, *said in found}
    return sorted(step_time_s for _, step_time_s, _ in plain)


# most spaces are larger than brute force can take; that is known before anything is evaluated
@given(wide_questions(most=MOST), st.sampled_from((1, 3)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_best_of_any_space_are_those_of_brute_force(asked, keep):
    question, costs = asked
    walk = walk_of(question, keep, costs=costs)
    assert exhaustive.run(walk)
    evaluator = Evaluator(*question[:3], costs)
    points = list(everything(question[3], *question[:3]))
    answers = {plan: evaluator(plan) for plan in (settled(*point, evaluator) for point in points)}
    fitting, best = once((plan, *a) for plan, a in answers.items() if a.fits), once(walk.fitting()[:keep])
    assert best == fitting[: len(best)]
    assert len(walk.fitting()) >= min(keep, len(fitting))
    assert walk.covered == len(points)
