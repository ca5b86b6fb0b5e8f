"""The roofline: hand calculations, quantisation, and the bounds no kernel beats."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Costs, load_framework
from meshwright.cost import roofline as r
from meshwright.cost.chain import Estimate
from meshwright.lower import lower
from meshwright.plan import parse
from meshwright.simulate.price import Pricer
from meshwright.spec import cluster
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train
from meshwright.work import AttentionCore, Collective, Elementwise, Gemm, Group, GroupedGemm, Hop

A100, H100 = cluster.load_device("a100-80"), cluster.load_device("h100")
DEVICES = cluster.devices()
SIZE = st.integers(1, 8192)


def product(rows):
    """Rows times 12 tiles of 128 columns, k long enough to be bound by the matrix units."""
    return Gemm(m=rows, n=12 * 128, k=8192)


def work_seconds(rows):
    return r.gemm_seconds(product(rows), A100) - r.KERNEL_FLOOR_S


def test_a_full_wave_runs_at_the_reachable_peak():
    # 9 x 12 = 108 tiles of 128 x 128 on 108 SMs: flops / (peak * fraction)
    fraction, published = r.efficiency(A100, "gemm")
    assert published
    assert work_seconds(9 * 128) == pytest.approx(product(9 * 128).flops / (312e12 * fraction))


def test_one_row_more_than_a_wave_costs_a_step():
    # In tiles of 64 x 64, the finest, 1152 rows are 18 x 24 = 432 tiles: four waves of 108. One row more makes 19 x 24:
    # five, and so up to 22 x 24 = 528; 23 x 24 = 552 are six.
    wave = work_seconds(1152)
    assert work_seconds(1153) == pytest.approx(5 / 4 * wave)
    assert work_seconds(1408) == pytest.approx(5 / 4 * wave)
    assert work_seconds(1409) == pytest.approx(6 / 4 * wave)


def test_two_sms_of_a_b200_that_multiply_one_tile_read_its_operands_once():
    """8192^3: 32 x 32 tiles of 256 x 256 on 74 pairs are 14 waves, bound by the matrix units. A single SM's 256 x 128
    needs 384 values a step of k, more than the L2 hands it meanwhile."""
    b200 = cluster.load_device("b200_sxm")
    fraction, _ = r.efficiency(b200, "gemm")
    per_sm, l2_per_sm = 2250e12 * fraction / 148, r.L2_BYTES_PER_CLOCK * b200.clock_mhz * 1e6
    square = Gemm(m=8192, n=8192, k=8192)
    waves, step_s = 14, 2 * 256 * 256 / (2 * per_sm)
    assert (256 + 256) * 2 / (2 * l2_per_sm) < step_s
    assert r.gemm_seconds(square, b200) == pytest.approx(waves * 8192 * step_s + r.KERNEL_FLOOR_S)
    alone_s = (256 + 128) * 2 / l2_per_sm
    assert alone_s > 2 * 256 * 128 / per_sm
    single = msgspec.structs.replace(b200, paired_sms=False)
    assert r.gemm_seconds(square, single) == pytest.approx(14 * 8192 * alone_s + r.KERNEL_FLOOR_S)


def test_what_pairs_its_sms_is_of_the_data_centre():
    """The workstation's Blackwell has no tcgen05."""
    assert {d.name for d in DEVICES if d.paired_sms} == {"b200_sxm", "b300_sxm", "gb200", "gb300"}


def test_a_small_product_is_a_launch_and_a_large_one_flops():
    assert r.gemm_seconds(Gemm(m=1, n=1, k=1), H100) < 1.01 * r.KERNEL_FLOOR_S
    big = Gemm(m=16384, n=16384, k=16384)
    fraction, _ = r.efficiency(H100, "gemm")
    assert r.gemm_seconds(big, H100) == pytest.approx(big.flops / (989.4e12 * fraction), rel=0.02)


def test_a_vector_product_is_bound_by_memory():
    # one token through 8192 x 8192 weights: 2 * 8192^2 bytes over the reachable bandwidth
    one = Gemm(m=1, n=8192, k=8192)
    fraction, _ = r.efficiency(H100, "memory")
    assert r.gemm_seconds(one, H100) >= 2 * 8192**2 / (3352e9 * fraction)
    assert r.gemm_seconds(one, H100) == pytest.approx(one.num_bytes / (3352e9 * fraction) + r.KERNEL_FLOOR_S, rel=0.5)


@given(SIZE, SIZE, SIZE, st.integers(1, 32), st.sampled_from(DEVICES), st.sampled_from(["bf16", "fp16", "fp32", "fp8"]))
def test_no_product_beats_the_two_roofs(m, n, k, batch, device, dtype):
    work = Gemm(m=m, n=n, k=k, batch=batch, dtype=dtype)
    seconds = r.gemm_seconds(work, device)
    assert seconds >= work.flops / r.peak_flops(device, dtype)
    assert seconds >= work.num_bytes / (device.memory_gb_s * 1e9)


@given(SIZE, SIZE, SIZE, st.sampled_from(DEVICES))
def test_a_product_of_more_rows_never_takes_less(m, n, k, device):
    a, b = (r.gemm_seconds(Gemm(m=rows, n=n, k=k), device) for rows in (m, m + 1))
    # within what choosing another tile or split may save
    assert b >= a * (1 - 1e-9) or a - b < r.KERNEL_FLOOR_S


@given(
    st.integers(1, 64), st.integers(1, 4096), st.integers(1, 64), SIZE, SIZE, st.booleans(), st.sampled_from(DEVICES)
)
def test_no_grouped_product_beats_the_two_roofs(groups, rows, imbalance, n, k, backward, device):
    work = GroupedGemm(
        groups=groups, rows=groups * rows, n=n, k=k, imbalance=1 + imbalance / 64, weight_gradient=backward
    )
    seconds = r.grouped_gemm_seconds(work, device)
    assert seconds >= work.flops / r.peak_flops(device, "bf16") * (1 - 0.5 / rows)  # rows are whole
    assert seconds >= work.num_bytes / (device.memory_gb_s * 1e9)


def attention(batch=1, seq=4096, heads=32, head_dim=128, backward=False, kv_heads=None):
    return AttentionCore(
        batch=batch,
        q_len=seq,
        kv_len=seq,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        pairs=seq * (seq + 1) / 2,
        backward=backward,
    )


@given(
    st.integers(1, 8),
    st.integers(1, 16384),
    st.integers(1, 128),
    st.sampled_from([64, 96, 128, 192, 256]),
    st.booleans(),
    st.sampled_from(DEVICES),
)
def test_no_attention_beats_the_two_roofs(batch, seq, heads, head_dim, backward, device):
    work = attention(batch, seq, heads, head_dim, backward)
    seconds = r.attention_seconds(work, device)
    assert seconds >= work.flops / r.peak_flops(device, "bf16")
    assert seconds >= work.num_bytes / (device.memory_gb_s * 1e9)


def test_attention_of_the_published_shape_reaches_the_published_fraction():
    # FlashAttention-3 (2407.08608): up to 740 TFLOP/s forward at head_dim 128; typical kernels reach 0.92 of the best
    work = attention(batch=1, seq=16384, heads=33)  # 33 heads of 128 blocks fill 132 SMs exactly
    seconds = r.attention_seconds(work, H100) - r.KERNEL_FLOOR_S
    assert work.flops / seconds == pytest.approx(989.4e12 * 0.75 * 0.92)


def test_narrow_heads_are_slower_for_the_same_operations():
    # the same exponentials for half the products: (64 + e) per pair, e = 64 on an H100 (4096 FLOP and 16 exp a clock)
    wide, narrow = attention(heads=33, head_dim=128), attention(heads=66, head_dim=64)
    assert wide.flops == narrow.flops
    ratio = (r.attention_seconds(narrow, H100) - r.KERNEL_FLOOR_S) / (
        r.attention_seconds(wide, H100) - r.KERNEL_FLOOR_S
    )
    assert ratio == pytest.approx((1 + 64 / 64) / (1 + 64 / 128), rel=0.01)


def test_attention_backward_does_five_products_for_two():
    assert attention(backward=True).flops == 2.5 * attention().flops


def test_elementwise_work_is_bytes_over_bandwidth_and_a_start_per_kernel():
    fraction, _ = r.efficiency(H100, "memory")
    seconds = r.elementwise_seconds(Elementwise(num_bytes=3352e9 * fraction, kernels=5), H100)
    assert seconds == pytest.approx(1.0 + 5 * r.KERNEL_FLOOR_S)


def test_a_gb300_multiplies_as_much_more_than_a_gb200_as_was_measured_on_both():
    """2174 of 2500 TFLOP/s at 1400 W and 1822 of 2500 at 1200 W: 1.19 times, where the power is 1.17 times."""
    new, old = (r.efficiency(cluster.load_device(name), "gemm")[0] for name in ("gb300", "gb200"))
    assert new / old == pytest.approx(2174 / 1822, rel=0.002)


def test_a_device_nobody_published_efficiencies_for_gets_flagged_defaults():
    bare = msgspec.structs.replace(H100, efficiency=None)
    assert r.efficiency(bare, "gemm") == (r.DEFAULT_EFFICIENCY["gemm"], False)
    assert r.efficiency(H100, "gemm") == (H100.efficiency.gemm * r.TYPICAL_OF_BEST["gemm"], True)


def test_block_scaled_formats_run_at_their_elements_peak_and_unsupported_ones_at_the_next():
    for scaled in ("fp8_row", "fp8_block", "mxfp8"):
        assert r.peak_flops(H100, scaled) == H100.peak_flops["fp8"]
    assert r.supports(H100, "fp8") and not r.supports(H100, "nvfp4") and not r.supports(A100, "fp8")
    assert r.peak_flops(A100, "fp8") == A100.peak_flops["bf16"]


def test_equal_work_is_priced_once_and_links_are_asked_in_order():
    asked = []

    def only_elementwise(work, device):
        asked.append(work)
        return Estimate(1.0, "elementwise", "table", 0.01) if isinstance(work, Elementwise) else None

    costs = Costs(links=(only_elementwise,))
    kernel, product = Elementwise(num_bytes=8.0, fused=True), Gemm(m=128, n=128, k=128)
    assert costs.price(kernel, H100).source == "table"
    assert costs.price(product, H100).seconds == Costs().price(product, H100).seconds
    assert costs.price(msgspec.structs.replace(product), H100).source == Costs().price(product, H100).source
    assert asked == [kernel, product]


def test_one_thing_faster_leaves_the_rest():
    costs, product, kernel = Costs(), Gemm(m=4096, n=4096, k=4096), Elementwise(num_bytes=1e9)
    twice = costs.faster("gemm", 2.0)
    assert twice.price(product, H100).seconds == costs.price(product, H100).seconds / 2
    assert twice.price(kernel, H100) == costs.price(kernel, H100)
    hop = Hop(name="nvlink", members=8, gb_s=450.0, latency_us=0.6, below=1, topology="switch")
    gather = Collective(op="all_gather", num_bytes=1e9, group=Group(size=8, hops=(hop,)))
    before, after = costs.price(gather, H100).seconds, costs.faster("nvlink", 2.0).price(gather, H100).seconds
    assert before / 2 <= after < 0.55 * before
    assert costs.faster("rail", 2.0).price(gather, H100).seconds == before


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("topology", ["switch", "ring", "mesh", "pcie", "torus"])
def test_no_collective_moves_more_than_its_ports_carry(op, topology):
    # the bytes that must enter or leave a rank, over its port: the buffer, or what others have of it
    n, size, gb_s = 8, 1e9, 100.0
    hop = Hop(name="x", members=n, gb_s=gb_s, latency_us=1.0, below=1, topology=topology)
    pair = msgspec.structs.replace(hop, members=2)
    group = Group(size=2, hops=(pair,)) if op == "send" else Group(size=n, hops=(hop,))
    least = {"all_reduce": 2 * (n - 1) / n, "send": 1.0, "broadcast": 1.0}.get(op, (n - 1) / n)
    seconds = [Costs().price(Collective(op=op, num_bytes=b, group=group), H100).seconds for b in (size, 2 * size)]
    assert seconds[0] >= least * size / (gb_s * 1e9)
    assert seconds[0] < seconds[1] < 2 * seconds[0]  # a start, then bytes


def test_adam_reads_and_writes_34_bytes_a_parameter():
    # the norm's pass reads the gradient (4); the update reads gradient (4), master and moments (12), and writes the
    # latter (12) and the 16-bit parameter (2)
    model = transformer(layers=2, hidden=256, heads=4, vocab=512, max_seq_len=64)
    where = cluster.load("1xh100")
    lowered = lower(parse("dp1 mb1"), model, where, Train(global_batch=1, seq_len=64))
    (at,) = (i for i, program in enumerate(lowered.programs) if program.kind == "update")
    waits = load_framework("default")
    idle = msgspec.structs.replace(waits, host_us_per_step=0.0)
    plain, waiting = (Pricer(Costs(one)).all(lowered.programs).durations[at] for one in (idle, waits))
    assert waiting == pytest.approx(plain + waits.host_us_per_step * 1e-6)  # the host's time of a step comes with it
    fraction, _ = r.efficiency(H100, "memory")
    moved = plain - 8 * r.KERNEL_FLOOR_S
    assert moved == pytest.approx(34 * model.num_params / (3352e9 * fraction))


def test_attention_blocks_fill_the_sms_in_waves():
    # 132 blocks of 128 queries are one wave of an H100, 133 are two; many keys, so that products bound it
    def seconds(heads):
        shape = {"q_len": 128, "kv_len": 65536, "head_dim": 128, "v_head_dim": 128, "pairs": 128 * 65536}
        return r.attention_seconds(AttentionCore(batch=1, heads=heads, kv_heads=1, **shape), H100) - r.KERNEL_FLOOR_S

    assert seconds(132) == pytest.approx(132 * 4 * 128 * 128 * 65536 / (989.4e12 * 0.75 * 0.92))
    assert seconds(133) == pytest.approx(2 * seconds(132))


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_a_large_product_reaches_the_devices_fraction_whatever_it_is_built_of(device):
    work = Gemm(m=8192, n=8192, k=8192)
    reached = work.flops / r.gemm_seconds(work, device) / r.peak_flops(device, "bf16")
    assert reached == pytest.approx(r.efficiency(device, "gemm")[0], rel=0.1)


def test_a_collective_takes_twenty_of_132_sms_and_none_where_the_fabric_has_engines():
    assert r.contention(H100) == 20 / 132
    assert r.contention(cluster.load_device("gb200")) == 20 / 152
    assert r.contention(cluster.load_device("t4")) == 20 / 132
    assert r.contention(cluster.load_device("tpu_v5p")) == r.contention(cluster.load_device("gaudi2")) == 0


def test_four_bit_products_read_half_the_operands_of_eight_bit_ones():
    b200 = cluster.load_device("b200")
    eight = Gemm(m=8192, n=8192, k=8192, dtype="fp8")
    fp4 = msgspec.structs.replace(eight, dtype="nvfp4")
    # the B200's fp4 peak is twice its fp8 peak, and so are the elements that a byte of L2 bandwidth brings
    ratio = r.gemm_seconds(eight, b200) / r.gemm_seconds(fp4, b200)
    assert 1.8 < ratio <= 2.0


def test_attention_of_blackwell_ultra_waits_half_as_long_for_its_exponentials():
    """At head dimension 128 a clock's 8192 FLOP are 128 times a multiprocessor's exponentials by 4, and 64 times with
    twice as many: (128 + 64) / (128 + 128) of the time; of a backward, by 10, (128 + 25.6) / (128 + 51.2)."""
    b300 = cluster.load_device("b300_sxm")
    half = msgspec.structs.replace(b300, exponentials_per_clock=16.0)
    for backward, ratio in ((False, 192 / 256), (True, 153.6 / 179.2)):
        work = AttentionCore(
            batch=4,
            q_len=8192,
            kv_len=8192,
            heads=37,
            kv_heads=37,
            head_dim=128,
            v_head_dim=128,
            pairs=8192.0**2,
            backward=backward,
        )
        floors = r.KERNEL_FLOOR_S * (3 if backward else 1)
        ours, theirs = (r.attention_seconds(work, device) - floors for device in (b300, half))
        assert ours == pytest.approx(ratio * theirs, rel=1e-3)  # the clock is rounded
    assert {d.name for d in DEVICES if d.exponentials_per_clock > 16} == {"b300_sxm", "gb300"}
