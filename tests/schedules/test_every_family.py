"""What holds for every schedule on every legal shape."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.schedules import build, families, get
from meshwright.schedules.actions import BW, B, F, W
from meshwright.schedules.text import parse_actions
from meshwright.schedules.timing import in_order_times, in_order_times_plain
from meshwright.schedules.verify import verify

NAMES = [prefix + name for name in families() for prefix in ("", "2bp:")]


@st.composite
def shapes(draw):
    """A schedule's name and a shape; legal for most draws."""
    name = draw(st.sampled_from(NAMES))
    family = get(name)
    vpp = draw(st.sampled_from(family.vpps or (1, 2, 3, 4)))
    p = draw(st.integers(1, 8))
    m = draw(st.one_of(st.integers(1, 40), st.integers(1, 5).map(lambda k: k * p)))
    return name, p, m, vpp


@settings(max_examples=300)
@given(shapes())
def test_every_legal_shape_builds_and_every_illegal_one_says_why(shape):
    name, p, m, vpp = shape
    found = get(name).legality(p, m, vpp)
    if found:
        with pytest.raises(MeshwrightError) as caught:
            build(name, p, m, vpp)
        assert caught.value.diagnostics == tuple(found)
        assert all(d.help and d.place for d in found)
        return
    actions = build(name, p, m, vpp)
    assert (actions.num_ranks, actions.num_stages, actions.num_microbatches) == (p, p * vpp, m)
    assert verify(actions) == []  # once per stage and direction, no deadlock in order
    _each_once(actions)
    assert parse_actions(actions.text()) == actions


def _each_once(actions):
    """F and one backward for each stage and microbatch, and a W for each split backward, after it."""
    cells = actions.num_stages * actions.num_microbatches
    key = actions.stage * actions.num_microbatches + actions.microbatch
    for kinds in ((F,), (B, BW)):
        assert sorted(key[np.isin(actions.kind, kinds)].tolist()) == list(range(cells))
    b, w = np.flatnonzero(actions.kind == B), np.flatnonzero(actions.kind == W)
    assert sorted(key[b].tolist()) == sorted(key[w].tolist())
    rank = actions.rank_of()
    split, weight = b[np.argsort(key[b])], w[np.argsort(key[w])]
    assert (split < weight).all() and (rank[split] == rank[weight]).all()


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
def test_any_legal_group_or_unit_of_microbatches_runs_to_its_end(p, m, vpp, size):
    if not get("interleaved").legality(p, m, vpp, group=size):
        assert verify(build("interleaved", p, m, vpp, group=size)) == []
    assert verify(build("zeropp", p, m, vpp, unit=size)) == []


@settings(max_examples=100)
@given(shapes(), st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3), st.floats(0.0, 1.0))
def test_the_compiled_clock_equals_the_plain_one(shape, times, t_comm):
    name, p, m, vpp = shape
    if get(name).legality(p, m, vpp):
        return
    actions = build(name, p, m, vpp)
    fast, plain = in_order_times(actions, *times, t_comm), in_order_times_plain(actions, *times, t_comm)
    np.testing.assert_allclose(fast, plain, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_stages_lie_where_the_placement_says(name):
    family, p = get(name), 4
    actions = build(name, p, 16)
    stage = np.arange(actions.num_stages)
    turn, place = np.divmod(stage, p)
    expected = {
        "linear": stage,
        "loop": place,
        "v": np.where(turn % 2 == 0, place, p - 1 - place),
        "wave": np.where(turn % 2 == 0, place, p - 1 - place),
    }
    for s, ranks in enumerate(actions.stage_ranks):
        if family.placement == "bidirectional":
            assert len(ranks) == 2 and sum(ranks) == p - 1
        else:
            assert ranks == (expected[family.placement][s],)


@pytest.mark.parametrize("name", NAMES)
def test_the_family_says_whether_its_backward_is_split(name):
    assert (build(name, 4, 16).kind == W).any() == get(name).splits_backward


def test_names_are_unique_and_every_family_cites_its_paper():
    words = [word for family in families().values() for word in (family.name, *family.aliases)]
    assert len(words) == len(set(words))
    assert all("arXiv" in family.paper for family in families().values())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(MeshwrightError, match="did you mean interleaved") as caught:
        get("interleave")
    assert caught.value.diagnostics[0].code == "S001"


def test_all_violations_come_at_once():
    found = get("1f1b").legality(0, 0, 3, group=2)
    assert [d.code for d in found] == ["S010", "S010", "S011", "S012"]


def test_interleaved_offers_the_counts_that_fit():
    found = get("interleaved").legality(4, 10, 2)
    assert found[0].code == "S013"
    assert "take 8 or 12 microbatches; or microbatches in groups of 5, 6, 10 (`group`)" in found[0].help
    assert verify(build("interleaved", 4, 10, 2, group=6)) == []


def test_a_build_is_kept_and_its_arrays_cannot_be_changed():
    assert build("zb-auto", 2, 4, t_f=[1.0, 2.0]) is build("zb-auto", 2, 4, t_f=(1.0, 2.0))
    with pytest.raises(ValueError, match="read-only"):
        build("1f1b", 2, 4).kind[0] = W


def test_closed_form_schedules_are_built_without_numba():
    code = (
        "import sys; from meshwright.schedules import build;"
        "[build(name, 4, 16) for name in ('gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-v', 'dualpipev')];"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
