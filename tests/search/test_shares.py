"""Batch shares against every way of dealing microbatches, and what search makes of unequal islands."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.answer.predict import predict
from meshwright.assign.shares import apportion
from meshwright.plan import check
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse

ASKED = model("llama3-8b"), cluster("8xa100-80 + 8xh100"), parse("batch=64,seq=4096")
FEW = ["cp=1", "order=tp-cp-pp-dp", "schedule=1f1b", "recompute=none,full", "mb=1", "tp=2,4", "pp=1,2,4", "zero=1"]


@st.composite
def deals(draw):
    kinds = draw(st.integers(1, 3))
    seconds = st.integers(1, 9).map(float)
    listed = lambda values: draw(st.lists(values, min_size=kinds, max_size=kinds))  # noqa: E731
    allowed = sorted(draw(st.sets(st.integers(1, 12), min_size=1)))
    return listed(seconds), listed(seconds), listed(st.integers(1, 3)), draw(st.integers(1, 24)), allowed


@given(deals())
@settings(max_examples=200)
def test_no_other_shares_have_a_faster_slowest_slice(deal):
    each, start, members, total, allowed = deal
    found = apportion(each, start, members, total, np.array(allowed))

    def slowest(shares):
        return max(s + n * e for s, n, e in zip(start, shares, each))

    every = [s for s in product(allowed, repeat=len(each)) if sum(n * m for n, m in zip(s, members)) == total]
    assert (found is None) == (not every)
    if every:
        assert found in every
        assert slowest(found) == min(map(slowest, every))


def test_a_slice_three_times_as_fast_takes_three_times_as_much():
    """By hand: 2 slices of 3 s a microbatch and 2 of 1 s, 64 microbatches: 8 x 3 s and 24 x 1 s end together."""
    assert apportion([3.0, 1.0], [0.0, 0.0], [2, 2], 64, np.arange(1, 33)) == (8, 24)


def test_shares_for_the_faster_island_beat_equal_ones_and_are_what_predict_says():
    space = restricted(default(*ASKED), fix=FEW)
    found = find(*ASKED, space=space, top=1)
    even = find(*ASKED, space=restricted(space, fix=["shares=even", "stages=even"]), top=1)
    assert found.proven_optimal and even.proven_optimal
    best = found.best[0]
    assert best.plan.layout.shares and not check(best.plan, *ASKED)
    assert best.prediction.step_time_s == predict(*ASKED, best.plan).step_time_s
    assert best.prediction.step_time_s < 0.7 * even.best[0].prediction.step_time_s


def test_stages_and_shares_that_are_said_are_values_of_their_facets():
    fix = ["cp=1", "order=tp-cp-pp-dp", "schedule=1f1b", "recompute=none", "mb=1", "tp=2", "pp=2", "zero=1"]
    found = find(*ASKED, space=restricted(default(*ASKED), fix=[*fix, "shares=10,22"]), top=1)
    assert found.best[0].plan.layout.shares == (10, 22)


def test_state_is_held_by_who_has_room_where_equal_shards_fit_nowhere():
    asked = model("qwen2.5-32b"), cluster("8xa100-40 + 8xh100"), parse("batch=32,seq=4096")
    fix = ["cp=1", "order=tp-cp-pp-dp", "recompute=full", "mb=1", "tp=1", "pp=1", "zero=3"]
    found = find(*asked, space=restricted(default(*asked), fix=fix), top=1)
    small, large = found.best[0].plan.kinds.hold
    assert small < large and not check(found.best[0].plan, *asked)
    assert min(one.headroom_bytes for one in predict(*asked, found.best[0].plan, detail=False).memory) >= 0
    even = find(*asked, space=restricted(default(*asked), fix=[*fix, "hold=even"]), top=1)
    assert not even.best and found.proven_optimal
