"""Bubbles against the papers' formulas and hand calculation, in slots of one stage's forward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedules import build
from meshwright.schedules.timing import bubble_rate, cost, in_order_times

RANKS = st.integers(2, 8)


def idle(name, p, m, vpp=None, t_f=1.0, t_b=1.0, t_w=1.0, t_comm=0.0):
    """Time lost: the cost less what a rank computes."""
    actions = build(name, p, m, vpp)
    start, end = in_order_times(actions, t_f, t_b, t_w, t_comm)
    return cost(actions, start, end) - m * actions.num_stages / p * (t_f + t_b + t_w)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=RANKS, m=st.integers(1, 40))
def test_gpipe_and_1f1b_lose_p_minus_1_of_m_plus_p_minus_1(name, p, m):
    # Huang et al. 2019, section 2.
    assert bubble_rate(build(name, p, m), 1, 1, 1) == pytest.approx((p - 1) / (m + p - 1))


@given(RANKS, st.integers(1, 5), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, vpp):
    # Narayanan et al. 2021, section 2.2: bubble / ideal = (p - 1) / (v m), here in chunk times.
    assert idle("interleaved", p, groups * p, vpp) == pytest.approx(3 * (p - 1))


@given(RANKS, st.integers(1, 4), st.integers(1, 4))
def test_breadth_first_has_the_interleaved_bubble(p, groups, vpp):
    # Lamy-Poirier 2022, equation 3: (N_PP - 1) / (N_mb N_loop).
    assert idle("breadth-first", p, groups * p, vpp) == pytest.approx(3 * (p - 1))


@given(RANKS, st.integers(0, 20))
def test_zb_h1_has_a_third_of_1f1bs_bubble_and_zb_h2_none_for_equal_times(p, more):
    # Qi et al. 2023, Table 2 with T_F = T_B = T_W.
    m = 2 * p + more
    assert idle("zb-h1", p, m) == pytest.approx((p - 1) * 1.0)
    assert idle("zb-h2", p, m) == pytest.approx(0.0)


@given(RANKS, st.integers(0, 20), st.floats(0.0, 0.5))
def test_the_handcrafted_bubbles_follow_table_2(p, more, less):
    # Qi et al. 2023, Table 2, for T_W <= T_F = T_B: (p - 1)(T_F + T_B - T_W) and (p - 1)(T_F + T_B - 2 T_W).
    m, t_w = 2 * p + more, 1.0 - less
    assert idle("zb-h1", p, m, t_w=t_w) == pytest.approx((p - 1) * (2 - t_w))
    assert idle("zb-h2", p, m, t_w=t_w) == pytest.approx((p - 1) * (2 - 2 * t_w), abs=1e-9)


@given(RANKS, st.integers(0, 20))
def test_zb_v_has_no_bubble_for_equal_times(p, more):
    assert idle("zb-v", p, 2 * p - 1 + more) == pytest.approx(0.0)


@given(RANKS, st.integers(0, 20))
def test_dualpipev_in_single_slots_loses_one_per_rank_but_the_first(p, more):
    # By hand: with F, B, W one slot each, each rank above the last adds F + B - W.
    assert idle("dualpipev", p, 2 * p + more) == pytest.approx(p - 1)


@given(st.integers(1, 4), st.integers(1, 4))
def test_chimera_loses_p_minus_2_slots_however_many_units(half, units):
    # Li and Hoefler 2021, Table 2: (D - 2) / (2 N + D - 2) for equal forward and backward.
    p = 2 * half
    m = units * p
    rate = bubble_rate(build("chimera", p, m), 1, 1, 0)
    assert rate == pytest.approx((p - 2) / (2 * m + p - 2))


@given(st.integers(1, 4))
def test_chimera_with_backward_twice_as_long_loses_as_its_paper_says(half):
    # Li and Hoefler 2021, section 3.1 for N = D: (D - 2) / (3 N / 2 + D - 2), in backward times.
    p = 2 * half
    assert bubble_rate(build("chimera", p, p), 1, 2, 0) == pytest.approx((p - 2) / (1.5 * p + p - 2))


@given(st.integers(1, 4), st.integers(1, 4))
def test_bitpipe_halves_chimeras_bubble(half, units):
    # p - 2 slots of stages half as large.
    p = 2 * half
    assert idle("bitpipe", p, units * p, t_w=0.0) == pytest.approx(p - 2)


@given(RANKS, st.integers(1, 3), st.integers(1, 3))
def test_hanayo_loses_the_same_slots_with_any_waves(p, waves, units):
    # By hand: 2 (p - 1) slots of one stage. One wave is Chimera with D = 2p and as many microbatches each way:
    # (D - 2) / (2 N + D - 2) with N = 2m gives the same.
    assert idle("hanayo", p, units * p, 2 * waves, t_w=0.0) == pytest.approx(2 * (p - 1))


@given(RANKS, st.integers(1, 3))
def test_hanayo_with_backward_twice_as_long_loses_as_chimera_does(p, waves):
    # Chimera's (D - 2) / (3 N / 2 + D - 2) with D = N = 2p for one wave; more waves divide the lost time.
    rate = bubble_rate(build("hanayo", p, p, 2 * waves), 1, 2, 0)
    assert rate == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))


@given(RANKS, st.integers(1, 4), st.integers(1, 3))
def test_zeropp_has_no_bubble_with_whole_units_and_equal_times(p, vpp, units):
    assert idle("zeropp", p, units * (2 * p - 1), vpp) == pytest.approx(0.0)


@given(RANKS, st.integers(1, 4))
def test_2bp_takes_the_bubble_of_gpipe_to_two_thirds_and_of_1f1b_to_one(p, units):
    # Rae et al. 2024, Table 1 for equal times: GPipe 2 (N - 1) / (2 (N - 1) + 3 M), 1F1B-1 (N - 1) / (4 N - 1).
    assert idle("2bp:gpipe", p, units * p) == pytest.approx(2 * (p - 1))
    assert bubble_rate(build("2bp:1f1b", p, p), 1, 1, 1) == pytest.approx((p - 1) / (4 * p - 1))


def test_a_lag_delays_the_receiver_and_occupies_nobody():
    # By hand, two ranks, one microbatch: F 1, lag 0.5, F 1, backward 2, lag 0.5, backward 2.
    start, end = in_order_times(build("1f1b", 2, 1), 1, 1, 1, 0.5)
    assert start.tolist() == [0.0, 5.0, 1.5, 2.5]
    assert end.tolist() == [1.0, 7.0, 2.5, 4.5]


def test_stages_on_one_rank_hand_over_at_once():
    # By hand, the V on one rank: no lag anywhere.
    _, end = in_order_times(build("zb-v", 1, 1), 1, 1, 1, 9.0)
    assert end.max() == 6.0


def test_each_boundary_may_have_its_own_lag():
    _, end = in_order_times(build("gpipe", 3, 1), 1, 1, 1, [0.25, 4.0])
    assert end.max() == 3 * 3 + 2 * (0.25 + 4.0)
