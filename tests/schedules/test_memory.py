"""Peak activations in flight on each rank, as each paper counts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedules import build
from meshwright.schedules.text import parse_actions
from meshwright.schedules.timing import peak_in_flight

RANKS, MICROBATCHES = st.integers(1, 8), st.integers(1, 40)


def peaks(name, p, m, vpp=None, **params):
    return peak_in_flight(build(name, p, m, vpp, **params)).tolist()


@given(RANKS, MICROBATCHES)
def test_gpipe_keeps_all_microbatches(p, m):
    assert peaks("gpipe", p, m) == [m] * p


@given(RANKS, MICROBATCHES)
def test_1f1b_keeps_as_many_as_ranks_remain(p, m):
    assert peaks("1f1b", p, m) == [min(p - r, m) for r in range(p)]


@given(RANKS, st.integers(1, 5), st.integers(2, 4))
def test_interleaved_keeps_its_warm_up_and_one(p, groups, vpp):
    # Narayanan et al. 2021, section 2.2: warm-up of 2 (p - r - 1) + (vpp - 1) p chunk forwards, then one more.
    m = groups * p
    assert peaks("interleaved", p, m, vpp) == [min(2 * (p - r - 1) + (vpp - 1) * p + 1, m * vpp) for r in range(p)]


@given(RANKS, MICROBATCHES, st.integers(1, 4))
def test_breadth_first_keeps_everything(p, m, vpp):
    assert peaks("breadth-first", p, m, vpp) == [m * vpp] * p


@given(RANKS, MICROBATCHES)
def test_zb_h1_keeps_what_the_first_rank_of_1f1b_keeps_on_every_rank(p, m):
    # Qi et al. 2023, Table 2: p M_B.
    assert peaks("zb-h1", p, m) == [min(p, m)] * p


@given(RANKS, MICROBATCHES)
def test_zb_h2_keeps_one_less_than_twice_the_ranks(p, m):
    # Qi et al. 2023, Table 2: (2p - 1) M_B.
    assert peaks("zb-h2", p, m) == [min(2 * p - 1, m)] * p


@given(RANKS, MICROBATCHES)
def test_zb_v_keeps_1f1bs_memory_in_halves(p, m):
    # Qi et al. 2023, section 6: p M_B, here 2p activations of stages half as large.
    assert max(peaks("zb-v", p, m)) <= 2 * p
    assert peaks("zb-v", p, m + 2 * p) == [2 * p] * p


@given(RANKS, st.integers(0, 20))
def test_dualpipev_keeps_one_more_than_its_stages(p, more):
    # DualPipe's published comparison: PP + 1 activations for PP = 2p stages.
    assert max(peaks("dualpipev", p, 2 * p + more)) == 2 * p + 1 if p > 1 else 3


@given(st.integers(1, 4), st.integers(0, 10))
def test_dualpipe_keeps_one_more_than_its_ranks(half, more):
    p = 2 * half
    assert max(peaks("dualpipe", p, 2 * p + 2 * more)) == p + 1


@given(st.integers(1, 4), st.integers(1, 4))
def test_chimera_keeps_half_a_unit_and_one_to_a_unit(half, units):
    # Li and Hoefler 2021, Table 2: [(D / 2 + 1) M_a, D M_a], largest on the middle ranks.
    p = 2 * half
    expected = [min(half + 1 + min(r, p - 1 - r), p) for r in range(p)]
    assert peaks("chimera", p, units * p) == expected


@given(st.integers(1, 4), st.integers(1, 20))
def test_bitpipe_keeps_at_most_one_unit_of_each_size_of_stage(half, pairs):
    assert max(peaks("bitpipe", 2 * half, 2 * pairs)) <= 2 * 2 * half


@given(RANKS, MICROBATCHES, st.sampled_from((2, 4, 6)))
def test_hanayo_keeps_at_most_1f1bs_largest_memory(p, m, vpp):
    assert max(peaks("hanayo", p, m, vpp)) <= vpp * min(p, m)


@given(RANKS, MICROBATCHES, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 12)))
def test_zeropp_keeps_at_most_a_unit_of_each_stage(p, m, vpp, unit):
    assert max(peaks("zeropp", p, m, vpp, unit=unit)) <= vpp * min(unit or 2 * p - 1, m)


@given(RANKS, MICROBATCHES)
def test_2bp_over_gpipe_keeps_everything_and_over_1f1b_no_less_than_1f1b(p, m):
    assert peaks("2bp:gpipe", p, m) == [m] * p
    assert (np.array(peaks("2bp:1f1b", p, m)) >= peaks("1f1b", p, m)).all()


@pytest.mark.parametrize(("keep_w", "expected"), [(1.0, 3.0), (0.5, 2.5), (0.0, 2.0)])
def test_a_split_backward_frees_its_share_of_the_activation(keep_w, expected):
    # By hand: held after each action is 1, 2, 1+k, 2+k, 2, 1+k, 1, k, 0.
    actions = parse_actions("F0 F1 B0 F2 W0 B1 W1 B2 W2")
    assert peak_in_flight(actions, keep_w).tolist() == [expected]
