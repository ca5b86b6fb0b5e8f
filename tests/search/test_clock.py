"""A clock, and what is known of a schedule before it is built, against the schedule itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright import schedules
from meshwright.schedules.actions import BW, B, F, W
from meshwright.schedules.timing import in_order_times
from meshwright.search.clock import ScheduleClock
from meshwright.search.paths import Work, undominated

FAMILIES = [name for name, family in schedules.families().items() if "t_f" not in family.params]


@st.composite
def shapes(draw):
    """(name, ranks, microbatches, chunks) of a legal schedule."""
    legal = [
        (name, pp, count, vpp)
        for name in (draw(st.sampled_from(FAMILIES)),)
        for pp in (1, 2, 3, 4, 6)
        for count in (1, 2, 4, 5, 8, 12)
        for vpp in (1, 2, 3, 4)
        if not schedules.get(name).legality(pp, count, vpp)
    ]
    return draw(st.sampled_from(legal))


@given(shapes(), st.integers(0, 2**32 - 1))
def test_a_clock_says_what_running_the_schedule_takes(shape, seed):
    actions, rng = schedules.build(*shape), np.random.default_rng(seed)
    f, b, w = rng.random((3, actions.num_stages))
    send = float(rng.random() / 3)
    turns = max(map(len, actions.stage_ranks))
    seconds = np.repeat(np.stack((f, b, w, b + w))[None], turns, axis=0)
    assert ScheduleClock(actions).makespan(seconds, send) == in_order_times(actions, f, b, w, send)[1].max()


def test_a_stage_on_two_ranks_takes_what_each_of_them_takes():
    """Chimera with two ranks and two microbatches, one each way: rank 1 three times slower, by hand. Both are busy with
    two forwards and two full backwards, the slower one for 3 + 3 + 6 + 6."""
    clock = ScheduleClock(schedules.build("chimera", 2, 2))
    assert clock.stage_ranks == ((0, 1), (0, 1))
    first = np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    assert clock.makespan(np.stack((first, 3 * first)), 0.0) >= 18.0
    assert clock.makespan(np.stack((first, first)), 0.0) < 18.0


@given(shapes())
def test_the_ranks_of_each_stage_are_known_before_the_schedule_is_built(shape):
    name, pp, _, vpp = shape
    family, built = schedules.get(name), schedules.build(*shape).stage_ranks
    assert list(map(sorted, family.ranks_of_stage(pp, vpp))) == list(map(sorted, built))
    ranks = family.rank_of_stage(pp, vpp)
    assert built == tuple((r,) for r in ranks) if ranks is not None else all(len(both) == 2 for both in built)


@given(shapes(), st.integers(0, 2**32 - 1))
def test_the_work_of_its_ranks_is_no_more_than_a_schedule_takes(shape, seed):
    name, pp, count, vpp = shape
    family, rng = schedules.get(name), np.random.default_rng(seed)
    actions = schedules.build(*shape)
    units = rng.integers(0, 3, (actions.num_stages, 2)).astype(float)
    times = rng.random((4, 1, 2))  # F, BW, B, W of one inner part
    work = Work.of([(family, pp, vpp, units)], count).longest(times, 0.0)[0, 0]
    at = dict(zip((F, BW, B, W), times[:, 0] @ units.T))
    seconds = np.repeat(np.stack([at[k] for k in (F, B, W, BW)])[None], max(map(len, actions.stage_ranks)), axis=0)
    assert work <= ScheduleClock(actions).makespan(seconds, 0.0) * (1 + 1e-12)


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=8))
def test_rows_that_are_left_out_are_nowhere_above_one_that_is_kept(rows):
    rows = np.array(rows, float)
    kept = undominated(rows)
    assert all((row <= kept).all(axis=1).any() for row in rows)
    assert all(not ((kept[i] <= kept[j]).all() and i != j) for i in range(len(kept)) for j in range(len(kept)))
