"""Shards by room against every way of cutting a small state, and by hand."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.assign.level import PARTS, level


def test_state_is_held_up_to_a_level_by_who_has_room_for_it():
    """By hand: 8 ranks with room for 0.6 of an even share hold that, the other 8 the rest, 1.4 each."""
    assert level([0.6, 2.0], [8, 8]) == (600, 1400)
    assert level([1.0, 1.3], [8, 8]) == ()
    assert level([0.0, 3.0], [2, 1]) == (0, 3 * PARTS)
    assert level([0.5, 1.4], [1, 1]) is None


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 3)), min_size=1, max_size=3))
@settings(max_examples=150, derandomize=True)
def test_no_other_sizes_have_a_smaller_largest_shard(asked):
    """Against every cut in eighths of an even share, which those up to a level are as near as their last thousandth."""
    room, members = [eighths / 8 for eighths, _ in asked], [count for _, count in asked]
    found = level(room, members)
    every = [
        cut
        for cut in product(*(range(eighths + 1) for eighths, _ in asked))
        if sum(c * m for c, m in zip(cut, members)) == 8 * sum(members)
    ]
    if found is None:
        assert not every
        return
    sizes = found or (PARTS,) * len(members)
    assert sum(s * m for s, m in zip(sizes, members)) >= PARTS * sum(members)
    assert all(size <= max(most, 1.0 if not found else 0.0) * PARTS + 1e-9 for size, most in zip(sizes, room))
    if every:
        assert max(sizes) <= min(max(cut) for cut in every) * PARTS / 8 + 1
