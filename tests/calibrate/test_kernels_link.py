"""The fitted link with the curves that ship: what it answers, how sure it is, and that it is small."""

from itertools import pairwise
from math import exp, log, log2

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.cost import Costs
from meshwright.cost.bound import KIN, SHAPES, joined, weight
from meshwright.cost.carried import Carried, Spreads
from meshwright.cost.chain import ROOFLINE_SIGMA, Estimate, roofline_estimate
from meshwright.cost.curve import RESIDUAL_UNIT, Fit, Residual
from meshwright.cost.fitted import Fitted, link, point, profiles, read_profile
from meshwright.cost.relatives import (
    BACKWARD_SHARE,
    SYNCHRONOUS_SHARE,
    apart,
    change,
    products_under_power,
    under_power,
)
from meshwright.cost.roofline import gemm_seconds, peak_flops
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.work import AttentionCore, Collective, Elementwise, Gemm, Group, GroupedGemm

H100 = load_device("h100_sxm")
TRAIN = link()
SERVE = link(serving=True)


def attention(batch=1, q=4096, kv=4096, heads=32, kv_heads=8, backward=False, width=128):
    pairs = q * (kv - q) + q * (q + 1) / 2
    return AttentionCore(
        batch=batch, q_len=q, kv_len=kv, heads=heads, kv_heads=kv_heads, head_dim=width, v_head_dim=width, pairs=pairs,
        backward=backward,
    )  # fmt: skip


def test_a_large_product_runs_at_the_rate_its_table_says():
    # AIConfigurator, SGLang 0.5.14 on H100: m 8192, n = k = 4096 in bf16 takes 347.9 us
    told = TRAIN(Gemm(m=8192, n=4096, k=4096), H100)
    assert told.seconds == pytest.approx(347.9e-6, rel=0.08)
    assert told.cause == "gemm" and 0 < told.sigma < 0.15
    assert told.source.startswith("fitted: h100_sxm gemm bf16") and "extrapolated" not in told.source


def test_a_prefill_and_a_decode_take_what_their_tables_say():
    # AIConfigurator, TensorRT-LLM 1.3.0rc20 on H100, 32 heads of 128, 8 key-value heads, bf16: 2 prompts of 16384
    # tokens 8195.5 us; one token of each of 64 sequences over 2048 keys 193.5 us
    assert SERVE(attention(2, 16384, 16384), H100).seconds == pytest.approx(8195.5e-6, rel=0.1)
    assert SERVE(attention(64, 1, 2048), H100).seconds == pytest.approx(193.5e-6, rel=0.15)


def test_outside_the_measured_range_the_answer_is_flagged_wider_and_tends_to_the_physics():
    inside, near, far = (TRAIN(Gemm(m=m, n=8192, k=8192), H100) for m in (8192, 2**18, 2**24))
    assert "extrapolated" not in inside.source
    assert near.source.endswith("extrapolated") and far.source.endswith("extrapolated")
    assert inside.sigma < near.sigma < far.sigma
    # 2^24 rows are 9 octaves outside: twice the rows are then twice the time but for the falling clock
    twice = TRAIN(Gemm(m=2**25, n=8192, k=8192), H100)
    assert 2.0 < twice.seconds / far.seconds < 2.2


def test_a_device_without_tables_gets_its_nearest_relative_with_a_wider_spread():
    work, other = attention(), load_device("b200_sxm")
    own, carried = TRAIN(work, H100), TRAIN(work, other)
    assert "carried to b200_sxm" in carried.source
    assert carried.sigma > own.sigma
    # more matrix units and bandwidth: faster, and never above its own peak
    assert work.flops / peak_flops(other, "bf16") < carried.seconds < own.seconds


def test_training_leaves_products_of_a_newer_generation_to_the_roofline_and_engines_to_relatives():
    # what frameworks take beside products was fitted with the roofline under them there
    work, b200 = Gemm(m=8192, n=4096, k=4096), load_device("b200_sxm")
    assert TRAIN(work, b200)._replace(sigma=0.0) == roofline_estimate(work, b200)._replace(sigma=0.0)
    assert "h100_sxm" in TRAIN(work, load_device("h800_sxm")).source
    # in an engine the B200 has curves of its own; left out, those of its variant answer
    without = link(serving=True, without="b200_sxm")
    assert "gb200 gemm fp8" in without(Gemm(m=8192, n=4096, k=4096, dtype="fp8"), b200).source
    rest = Fitted({n: p for n, p in profiles(serving=True)[0].items() if "b200" not in n}, Spreads(()), serving=True)
    eight = rest(Gemm(m=8192, n=4096, k=4096, dtype="fp8"), b200).source
    assert "h100_sxm gemm fp8" in eight and "carried to b200_sxm, with " in eight
    # of what is far from all that were measured the roofline is one price among others
    work, t4 = Gemm(m=8192, n=4096, k=4096, dtype="fp16"), load_device("t4")
    prices = [(one.price(point(work).x).seconds, weight(one.distance)) for one in SERVE.bound(t4, ("gemm",), "fp16")]
    prices.append((roofline_estimate(work, t4).seconds, weight(4.0)))
    mean = sum(w * log(s) for s, w in prices) / sum(w for _, w in prices)
    assert SERVE(work, t4).seconds == pytest.approx(exp(mean))


def test_a_device_of_the_same_generation_is_preferred_to_one_of_another():
    assert "h100_sxm" in TRAIN(Gemm(m=8192, n=4096, k=4096), load_device("h800_sxm")).source
    assert "a100_80gb_sxm" in TRAIN(Gemm(m=8192, n=4096, k=4096), load_device("a100_40gb_sxm")).source


@pytest.mark.parametrize("name", ["mi300x", "tpu_v5p", "gaudi2"])
def test_other_vendors_are_left_to_the_roofline(name):
    work, device = Gemm(m=4096, n=4096, k=4096), load_device(name)
    # as sure as the roofline was of devices that were measured, which is less than of the best published kernels
    assert TRAIN(work, device).sigma > ROOFLINE_SIGMA["gemm"]
    assert TRAIN(attention(), device) is None
    assert Costs(links=(TRAIN,)).price(work, device).seconds == gemm_seconds(work, device)


def test_what_has_no_curve_is_passed_on():
    assert TRAIN(Elementwise(num_bytes=1e6), H100) is None
    assert TRAIN(Collective(op="all_reduce", num_bytes=1e6, group=Group(size=1, hops=())), H100) is None
    assert TRAIN(msgspec.structs.replace(attention(), dtype="fp32"), H100) is None


def test_flash_attention_2_is_slower_on_hopper_than_its_own_kernels():
    # FlashAttention-3 (2407.08608): 1.5 to 2 times faster than FlashAttention-2 on H100
    long, old = attention(4, 8192, 8192), link(flash=2)
    assert 1.2 < old(long, H100).seconds / TRAIN(long, H100).seconds < 2.2
    back = msgspec.structs.replace(long, backward=True)
    assert TRAIN(back, H100) is None  # no table of Hopper's own backward kernels: the published fraction answers
    assert 2.0 < old(back, H100).seconds / old(long, H100).seconds < 4.0


def test_backward_attention_takes_two_to_four_times_the_forward_on_a100():
    a100 = load_device("a100_80gb_sxm")
    forward, backward = (TRAIN(attention(4, backward=b), a100).seconds for b in (False, True))
    assert 2.0 < backward / forward < 4.0


@pytest.mark.parametrize("device", ["h100_sxm", "a100_80gb_sxm", "h200_sxm", "gh200"])
@pytest.mark.parametrize("n, k", [(4096, 4096), (8192, 1024), (1024, 8192), (28672, 8192)])
def test_more_rows_are_never_much_faster(device, n, k):
    # a tile or split that fits better may save a little; a table's bump must not save a lot
    times = [TRAIN(Gemm(m=m, n=n, k=k), load_device(device)).seconds for m in (64 * 2**i // 2 for i in range(12))]
    assert all(later > 0.85 * earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp8_block"])
def test_experts_cost_more_with_more_rows_and_more_of_them(dtype):
    def seconds(groups, rows):
        return TRAIN(GroupedGemm(groups=groups, rows=rows, n=4096, k=4096, dtype=dtype), H100).seconds

    assert seconds(8, 512) < seconds(8, 8192) < seconds(8, 65536)
    assert seconds(8, 64) < seconds(64, 64)


@given(
    m=st.integers(1, 2**17), n=st.integers(1, 2**16), k=st.integers(1, 2**16), batch=st.integers(1, 512),
    dtype=st.sampled_from(sorted(KIN)),
)  # fmt: skip
def test_no_product_beats_the_peak_and_every_answer_is_sure_to_some_degree(m, n, k, batch, dtype):
    work = Gemm(m=m, n=n, k=k, batch=batch, dtype=dtype)
    told = TRAIN(work, H100)
    assert told.seconds >= work.flops / peak_flops(H100, dtype) / 1.1
    assert 0 < told.sigma < 5


def test_a_residual_is_interpolated_linearly_between_its_nodes():
    values = (0, 40, 80, 10, 50, 90)  # value(x, y) = 40 y + 10 x at x 0, 1 and y 0, 1, 2
    fit = Fit(
        op="gemm", dtype="bf16", source="", rows=0, constants={}, nodes=((0.0, 1.0), (3.0,), (0.0, 1.0, 2.0)),
        residual=values, low=(0.0, 3.0, 0.0), high=(1.0, 3.0, 2.0), sigma=(0.1,) * 4,
    )  # fmt: skip
    table = Residual(fit)
    assert table.at((0.25, 3.0, 1.5)) == pytest.approx((40 * 1.5 + 10 * 0.25) * RESIDUAL_UNIT)
    assert table.at((9.0, 7.0, -4.0)) == pytest.approx(10 * RESIDUAL_UNIT)  # held at the edge
    assert table.outside((0.5, 3.0, 1.0)) == 0 and table.outside((2.0, 2.0, 1.0)) == 2.0


def test_profiles_are_small_sourced_and_whole():
    folder = catalog.folder("profiles").joinpath("kernels")
    files = [f for f in folder.iterdir() if f.name.endswith(".json")]
    assert sum(len(f.read_bytes()) for f in files) < 150_000
    known, transfer = profiles()
    assert {"h100_sxm", "h200_sxm", "a100_80gb_sxm"} <= set(known)
    for name, profile in known.items():
        assert load_device(name).name == profile.device == name
        for fit in profile.curves:
            shape = SHAPES[fit.op]
            assert set(fit.constants) == {c.name for c in shape.constants}
            assert all(c.low <= fit.constants[c.name] <= c.high for c in shape.constants)
            assert "(" in fit.source and fit.rows > 0 and len(fit.sigma) == 4
            assert fit.errors["in_sample_median"] < 0.2
    near = [one for one in transfer.rows if one.left == "device" and one.distance < 0.5]
    assert near and all(0 < sigma < 1.5 for one in near for sigma in one.spread)
    assert {one.device for one in transfer.rows} == set(profiles(serving=True)[0])


def test_a_device_left_out_is_answered_by_others_as_surely_as_they_predicted_others():
    work = attention()
    own, out = (one(work, H100) for one in (SERVE, link(serving=True, without="h100_sxm")))
    assert "h100_sxm" in own.source and "carried to h100_sxm" in out.source and "h200_sxm" in out.source
    assert out.sigma > own.sigma
    # nothing that H100 rows or H100 curves showed is in that spread
    left = profiles(serving=True)[1].without("h100_sxm").rows
    assert left and not any("h100_sxm" in (one.device, one.from_device) for one in left)


def test_devices_are_as_far_apart_as_their_multiprocessors_differ():
    """By hand, in octaves of what one computes in a clock: A100 312e12 / 108 / 1410 MHz, H100 989.4e12 / 132 / 1830."""
    a100, h200, b200, rtx, l40s = map(load_device, ("a100_80gb_sxm", "h200_sxm", "b200_sxm", "rtx5090", "l40s"))
    assert apart(H100, h200, "bf16", "bf16") == 0.0
    assert apart(H100, H100, "bf16", "fp8") == pytest.approx(1.0 + 2.0, abs=0.01)
    lanes = log2((989.4 / 132 / 1830) / (312 / 108 / 1410))
    assert apart(a100, H100, "bf16", "bf16") == pytest.approx(lanes + 2.0 * log2(132 / 108), rel=1e-6)
    assert apart(H100, b200, "bf16", "bf16") < apart(l40s, b200, "bf16", "bf16")
    # workstation Blackwell is like Ada, not like the B200
    assert apart(l40s, rtx, "bf16", "bf16") < apart(H100, rtx, "bf16", "bf16") < apart(b200, rtx, "bf16", "bf16")
    assert "flash_fwd" in TRAIN(attention(), rtx).source  # FlashAttention-3 runs on compute capability 9 alone


def test_a_carried_curve_keeps_its_cycles_and_what_its_instructions_reach():
    """An A100's clock is 1410 MHz, an H100's 1830: what takes 13 us there takes 10 here. FlashAttention-2 is written in
    instructions of which Hopper runs 63% as many as it can multiply by its own."""
    a100 = load_device("a100_80gb_sxm")
    gemm = change(a100, H100, ops=("gemm", "gemm"), dtypes=("bf16", "bf16"))
    assert gemm == (1.0, 1.0, pytest.approx(1410 / 1830))
    flash = change(a100, H100, ops=("flash_fwd", "flash_fwd"), dtypes=("fp16", "fp16"))
    assert flash.rate == SYNCHRONOUS_SHARE
    assert change(a100, a100, ops=("flash_fwd", "flash_bwd"), dtypes=("fp16", "fp16")).rate == BACKWARD_SHARE
    # GH200's FlashAttention-2 reaches 0.39 of its peak, the A100's 0.63: the share comes back
    gh200 = load_device("gh200")
    assert change(gh200, a100, ops=("flash_fwd", "flash_fwd"), dtypes=("fp16", "fp16")).rate == 1 / SYNCHRONOUS_SHARE


def test_devices_of_little_power_clock_lower_while_their_vector_units_are_busy():
    """L4: 72 W for 30.3e12 operations at 16 * 0.28 W for 1e12 of them; a V100 has what it needs."""
    assert under_power(load_device("l4"), "fp32") == pytest.approx(72 / (16 * 0.28 * 30.3))
    assert under_power(load_device("v100_pcie_32gb"), "fp32") == under_power(load_device("l4"), "bf16") == 1.0
    # NeuSight's table, L4: m 4096, n 4096, k 4096 in fp32 runs at a third of the peak at most
    work = Gemm(m=4096, n=4096, k=4096, dtype="fp32", out_bytes=4.0)
    l4 = load_device("l4")
    assert 0.2 < work.flops / link(without="l4")(work, l4).seconds / l4.peak_flops["fp32"] < 0.5


def test_products_of_devices_whose_power_limits_their_matrix_units_are_told_by_one_another():
    """L40S: 350 W for 362e12 operations at 1.4 W for 1e12 of them; RTX 4090: 450 W for 165e12, which is enough."""
    l40s, pro, wide = (load_device(name) for name in ("l40s", "rtx_pro_6000_server", "rtx4090"))
    assert products_under_power(l40s, "bf16") == pytest.approx(350 / (1.4 * 362.05))
    assert products_under_power(pro, "bf16") / products_under_power(l40s, "bf16") == pytest.approx(
        600 / 350 * 362.05 / 480
    )
    assert products_under_power(wide, "bf16") == products_under_power(H100, "bf16") == 1.0
    # AIConfigurator's tables, m 4096, n 7168: 232e12 operations a second of the L40S at k 8192, 418e12 of the RTX PRO
    # 6000 at k 7168
    for device, k, reached in ((l40s, 8192, 232e12), (pro, 7168, 418e12)):
        work = Gemm(m=4096, n=7168, k=k, dtype="bf16")
        carried = link(serving=True, without=device.name)(work, device)
        assert work.flops / carried.seconds == pytest.approx(reached, rel=0.15)


def test_few_devices_are_pulled_towards_what_more_of_them_show():
    def carried(device, dtype, spread, left="device"):
        told = {"rows": 1, "median_ape": 0.0, "p90_ape": 0.0, "bias": 0.0, "from_device": "x", "distance": 1.0}
        return Carried(op="gemm", dtype=dtype, device=device, left=left, spread=(spread,) * 4, **told)

    left = Spreads((carried("a", "bf16", 0.1), carried("b", "bf16", 0.3), carried("c", "fp8", 0.5)))
    # variances by hand, half a device's worth of the wider class each: all 0.35 / 3, of the kind the same; 8-bit ones
    # (0.25 + half of that) / 1.5
    assert left.of("gemm", 1.0, "fp8")[0] == pytest.approx(((0.25 + 0.35 / 6) / 1.5) ** 0.5)
    assert left.without("c").of("gemm", 1.0, "fp8")[0] == pytest.approx(0.05**0.5)
    assert Spreads(()).of("gemm", 1.0, "fp8") == (0.3,) * 4
    # rows from farther away count less: two at 1 and one at four times the (softened) distance
    far = Spreads((carried("a", "bf16", 0.1), msgspec.structs.replace(carried("b", "bf16", 0.5), distance=4.75)))
    assert far.of("gemm", 1.0, "bf16")[0] < 0.2 < 0.4 < far.of("gemm", 4.75, "bf16")[0]
    roof = Spreads((carried("a", "bf16", 0.2, left="roofline"),))
    assert roof.by_roofline("gemm", "bf16")[0] == pytest.approx(0.2) and roof.of("gemm", 1.0, "bf16")[0] == 0.3


def test_a_curve_that_no_device_was_left_out_of_is_as_sure_as_the_one_of_its_formula():
    told = {"rows": 1, "median_ape": 0.0, "p90_ape": 0.0, "bias": 0.0, "from_device": "x", "dtype": "bf16"}
    left = Spreads((Carried(op="prefill", device="a", left="device", distance=2.0, spread=(0.7,) * 4, **told),))
    assert left.of("flash_fwd", 2.0, "fp16")[0] == pytest.approx(0.7)
    assert left.of("decode", 2.0, "fp16")[0] == pytest.approx(0.7)  # of any kind from so far


def test_prices_from_several_devices_are_a_weighted_mean_of_logarithms():
    """Logarithms 0 and 1 that weigh 4 and 1: 0.2, and the spread 0.8 * 0.5 + 0.2 * 1."""
    near, far = Estimate(1.0, "gemm", "a, extrapolated", 0.5), Estimate(exp(1.0), "gemm", "b", 1.0)
    both = joined([(near, 4.0), (far, 1.0)])
    assert both.seconds == pytest.approx(exp(0.2)) and both.sigma == pytest.approx(0.6)
    assert both.source == "a, with 1 more, extrapolated"
    assert joined([(near, 4.0)]) == near


def test_variants_of_a_chip_answer_all_but_alone_and_others_together():
    work, a100 = attention(batch=64, q=1), load_device("a100_80gb_sxm")
    curves = link(serving=True, without=a100.name).bound(a100, ("decode",), "bf16")
    assert len(curves) > 3 and [one.distance for one in curves] == sorted(one.distance for one in curves)
    times = [one.price(point(work, serving=True).x).seconds for one in curves]
    assert min(times) < link(serving=True, without=a100.name)(work, a100).seconds < max(times)
    h800 = SERVE(work, load_device("h800_sxm"))
    assert h800.seconds == pytest.approx(SERVE(work, H100).seconds, rel=0.15)
    # a precision that was not measured: by others' curves of it and the device's own of another
    own = [f for f in profiles(serving=True)[0]["h100_sxm"].curves if f.dtype != "fp8"]
    known = profiles(serving=True)[0]
    known = known | {"h100_sxm": msgspec.structs.replace(known["h100_sxm"], curves=tuple(own))}
    asked = Fitted(known, profiles()[1], serving=True)
    eight = msgspec.structs.replace(work, dtype="fp8")
    assert asked(eight, H100).seconds == pytest.approx(SERVE(eight, H100).seconds, rel=0.25)
    assert asked(eight, H100).sigma > SERVE(eight, H100).sigma


def test_numbers_of_another_width_are_less_sure():
    device = load_device("h100_sxm")
    assert "gemm fp8" in SERVE(Gemm(m=4096, n=4096, k=4096, dtype="nvfp4"), device).source
    sigmas = [SERVE(Gemm(m=4096, n=4096, k=4096, dtype=d), device).sigma for d in ("nvfp4", "fp8_block")]
    assert sigmas[0] > 2 * sigmas[1]


def test_curves_reach_over_the_measured_range_of_training_shapes():
    for name in ("h100_sxm", "a100_80gb_sxm"):
        fit = next(c for c in profiles()[0][name].curves if (c.op, c.dtype) == ("gemm", "bf16"))
        assert fit.low[0] == 0 and fit.high[0] >= log2(16384)


def test_a_file_of_another_format_is_refused_with_the_way_to_mend_it():
    with pytest.raises(MeshwrightError, match="format_version 2 is not 1") as caught:
        read_profile(b'{"format_version": 2}', "h100_sxm.json")
    assert "meshwright calibrate" in caught.value.diagnostics[0].help
    with pytest.raises(MeshwrightError, match="not a kernel profile"):
        read_profile(b"[]", "h100_sxm.json")


def test_training_in_8_bits_scales_whole_tensors_unless_it_says_rows():
    """The tables' fp8 kernel scales every token: it stands for rows; whole tensors are at least as quick as blocks."""
    large = {"m": 16384, "n": 8192, "k": 8192}
    tensor, row, block = (TRAIN(Gemm(dtype=d, **large), H100) for d in ("fp8", "fp8_row", "fp8_block"))
    assert "gemm fp8_block" in tensor.source and "gemm fp8 " in row.source
    assert tensor.seconds == block.seconds < row.seconds
    # in an engine the kernel is the one its table was measured with
    assert "gemm fp8 " in SERVE(Gemm(dtype="fp8", **large), H100).source
