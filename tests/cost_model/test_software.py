"""What software does to the same work: kernels that store less, slices on streams, exchanges beside compute."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.calibrate import framework as framework_fit
from meshwright.causes import CAUSE
from meshwright.cost import Costs, fitted, load_framework, standard
from meshwright.cost.fitted import FIRST_FLASH
from meshwright.cost.framework import Defaults, Framework, frameworks
from meshwright.layers.head import pieces as head
from meshwright.layers.pieces import linear
from meshwright.lower.layer import program
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.state import activations
from meshwright.plan import Overlap, parse
from meshwright.simulate.layer import LOOPED_CALL_US, cost
from meshwright.simulate.step import simulate
from meshwright.spec.architecture import HEAD
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.cluster import load_device
from meshwright.spec.model import transformer
from meshwright.spec.workload import Lora, Train
from meshwright.work import PERMUTE, AttentionCore, Collective, Elementwise, Gemm, GroupedGemm
from tests.lower.sizes import context
from tests.random_plans import GPT, MIXTURE, sized

S = 128
TRAIN = Train(global_batch=64, seq_len=S)
A100, H100 = load_device("a100_80gb_sxm"), load_device("h100_sxm")


def stages(words, model=GPT):
    plan = parse(words)
    return Stages(plan, model, TRAIN, Mesh(plan, sized(plan)))


def test_separate_loss_kernels_move_52_bytes_a_logit_and_a_fused_one_8():
    # forward: cast 2+4, maximum 4, difference 4+4, exponential 4+4, sum 4; backward: normalise 8, scale 8, cast 4+2
    logits = S * GPT.vocab
    for words, moved, kept in (("dp1", 30 + 22, 4), ("dp1 loss=in-place", 30 + 22, 4), ("dp1 loss=fused", 4 + 4, 2)):
        (loss,) = [p for p in head(stages(words).context(), GPT.head) if p.name == "cross-entropy"]
        assert loss.forward.num_bytes + loss.backward.num_bytes == moved * logits
        assert loss.saved == kept * logits
        assert loss.forward.fused  # no framework's passes come on top


@pytest.mark.parametrize("kernel", ["fused", "in-place", "copied"])
def test_the_loss_kernel_is_a_word_of_the_plan(kernel):
    plan = parse(f"tp2 dp4 loss={kernel}")
    assert plan.memory.loss == kernel
    assert parse(plan.text()) == plan


def test_a_gradient_written_over_the_probabilities_needs_no_room_of_its_own():
    """Beside 4 bytes a logit that are kept: 8 for the loss's gradient and the softmax's, or 2 for a cast alone, which
    the projection then needs together with its input, or 4 for the logits that the probabilities are made of."""
    wide = transformer(layers=2, hidden=256, heads=4, vocab=100_000, name="wide")

    def working(words):
        of = stages(words, wide)
        found = activations(of.context(), of.pieces(HEAD), "none")
        return found.saved, found.working - 2 * S * 256 * 2

    logits = S * 100_000
    kept, apart = working("dp1")
    assert apart == 8 * logits
    assert working("dp1 loss=in-place") == (kept, 2 * logits + S * 256 * 2)
    assert working("dp1 loss=copied") == (kept, 4 * logits)


def test_a_parallel_block_crosses_its_tensor_parallel_region_once():
    serial = GPT
    blocks = tuple(msgspec.structs.replace(b, parallel=True, norms=1) for b in GPT.blocks)
    parallel = msgspec.structs.replace(GPT, blocks=blocks)

    def crossings(model, which):
        entries = program(stages("tp4 dp1", model).pieces(0), which)
        return [e.work.op for e in entries if isinstance(e.work, Collective)]

    assert sorted(crossings(serial, "F")) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert sorted(crossings(parallel, "F")) == ["all_gather", "reduce_scatter"]


def test_slices_on_several_streams_fill_each_others_waves():
    whole, slice_ = Gemm(m=2048, n=4608, k=12288), Gemm(m=256, n=4608, k=12288, slices=8)
    together, alone = standard(Framework(name="x")), standard(load_framework("nanotron-slow-steps"))
    assert together.price(slice_, A100).seconds == pytest.approx(together.price(whole, A100).seconds / 8)
    assert alone.price(slice_, A100).seconds > 1.05 * together.price(slice_, A100).seconds


@pytest.mark.parametrize("width, fast", [(128, True), (104, True), (108, False), (150, False)])
def test_batched_products_of_unaligned_rows_leave_the_matrix_units(width, fast):
    # heads 104 and 112 wide run like 128, 108 and 150 take many times as long (bigscience chronicles-prequel)
    work = Gemm(m=2048, n=2048, k=width, batch=32, dtype="fp16")
    rate = work.flops / standard().price(work, A100).seconds
    assert (rate > 40e12) == fast
    assert rate > 40e12 or rate < A100.peak_flops["fp32"]


def test_the_first_flash_attention_reaches_about_half_the_rate_of_the_second():
    work = AttentionCore(
        batch=4, q_len=4096, kv_len=4096, heads=16, kv_heads=16, head_dim=128, v_head_dim=128, pairs=4096 * 4097 / 2
    )
    first, second = (standard(load_framework(name)).price(work, H100) for name in ("llm-foundry-fsdp", "torchtitan"))
    assert second.seconds / first.seconds == pytest.approx(FIRST_FLASH)
    assert "FlashAttention 1" in first.source


def test_the_experts_exchange_beside_compute_takes_the_longer_of_both():
    words = "ep4 etp1 dp4"
    pieces = stages(words, MIXTURE).pieces(len(MIXTURE.blocks) - 1)
    costs = Costs(Framework(name="x", host_us_per_kernel=0.0, host_us_per_collective=0.0, elementwise_passes=1.0))
    waiting = cost(program(pieces, "F"), "F", H100, costs)
    beside = cost(program(pieces, "F", overlap=Overlap(ep=True)), "F", H100, costs)
    ep = CAUSE["ep"]
    assert 0 < beside.seconds < waiting.seconds
    assert beside.seconds >= max(waiting.parts[ep], waiting.seconds - waiting.parts[ep]) * (1 - 1e-9)


def test_every_group_of_a_grouped_product_is_one_call_of_a_loop_for_the_host():
    """The operator costs what any does, 10 ms here, and every expert a call from C++ more."""
    pieces = stages("dp1", MIXTURE).pieces(len(MIXTURE.blocks) - 1)
    slow = Costs(Framework(name="x", host_us_per_kernel=1e4, elementwise_passes=1.0))
    groups = {e.work.groups for e in program(pieces, "F") if hasattr(e.work, "groups")}
    (count,) = groups
    assert count > 1
    grouped = sum(hasattr(e.work, "groups") for e in program(pieces, "F"))
    operators = sum(getattr(e.work, "kernels", 1) for e in program(pieces, "F"))
    assert grouped >= 2
    issued = operators * 1e-2 + grouped * count * LOOPED_CALL_US * 1e-6
    assert cost(program(pieces, "F"), "F", H100, slow).seconds == pytest.approx(issued, rel=1e-6)


def test_experts_are_trained_with_a_product_each_and_served_with_one_kernel():
    grouped = GroupedGemm(groups=8, rows=8 * 4096, n=14336, k=4096)
    each = Gemm(m=4096, n=14336, k=4096, batch=8)
    training, serving = standard(), Costs(links=(fitted.link(serving=True),))
    for device in (A100, H100):
        assert training.price(grouped, device).seconds == pytest.approx(training.price(each, device).seconds)
        assert "grouped_gemm" in serving.price(grouped, device).source
    # what trains reaches as much of the peak on both; the serving kernel that was measured on the A100 does not
    shares = [grouped.flops / training.price(grouped, d).seconds / d.peak_flops["bf16"] for d in (A100, H100)]
    assert all(0.5 < share < 1 for share in shares)
    assert grouped.flops / serving.price(grouped, A100).seconds < 0.3 * A100.peak_flops["bf16"]


@pytest.mark.parametrize(
    "words, longer", [("zero3 mb1", True), ("pp2 zero3 mb1", False), ("zero2 mb1", False), ("mb1", False)]
)
def test_an_exchange_layer_by_layer_that_reaches_a_tenth_of_the_network_takes_longer(words, longer):
    """The share that ZeRO-3 reaches says nothing of whole gradients, which the other stages, and ZeRO-3 under a
    pipeline, sum once a step."""
    plan, cluster = parse(words).on(16), load_cluster("2x8xa100_80gb_sxm")
    train = Train(global_batch=16, seq_len=S)
    usual = Framework(name="x")
    times = [
        simulate(plan, GPT, cluster, train, standard(msgspec.structs.replace(usual, exchange_share=s))).step_time_s
        for s in (1.0, 0.1)
    ]
    assert (times[0] < times[1]) == longer
    assert times[0] <= times[1]


def test_a_separate_accumulation_reads_the_gradient_and_reads_and_writes_the_sum():
    fused = Framework(name="x", elementwise_passes=1.0, host_us_per_kernel=0.0)
    apart = msgspec.structs.replace(fused, defaults=Defaults(accumulation="separate"))
    work = Gemm(m=4096, n=4096, k=2048, out_bytes=4.0, accumulate=True)
    alone = Gemm(m=4096, n=4096, k=2048, out_bytes=2.0)
    added = Elementwise(num_bytes=4096 * 4096 * (2 + 4 + 4), fused=True)
    a, b = Costs(apart), Costs(fused)
    assert a.price(work, H100).seconds == pytest.approx(b.price(alone, H100).seconds + b.price(added, H100).seconds)
    # the sum is touched once a microbatch, whatever its tokens, so what it costs a token falls with the microbatch
    longer = msgspec.structs.replace(work, k=8192), msgspec.structs.replace(alone, k=8192)
    extra = [a.price(w, H100).seconds - b.price(o, H100).seconds for w, o in ((work, alone), longer)]
    assert extra[0] == pytest.approx(extra[1])
    # and the host issues one more kernel for every weight
    pieces = stages("dp1").pieces(0)
    issue = [
        cost(program(pieces, "W"), "W", H100, Costs(msgspec.structs.replace(f, host_us_per_kernel=1e4))).seconds
        for f in (apart, fused)
    ]
    assert issue[0] == pytest.approx(2 * issue[1], rel=1e-2)


def test_a_variant_at_a_lower_power_limit_runs_products_at_the_cube_root_of_the_power():
    costs = standard()
    work = Gemm(m=16384, n=16384, k=16384)
    slow = msgspec.structs.replace(H100, name="h100_slow", differs_from="h100_sxm: limited", tdp_w=350.0)
    ratio = costs.price(work, slow).seconds / costs.price(work, H100).seconds
    assert ratio == pytest.approx(2 ** (1 / 3), rel=0.02)
    # a variant with a rated peak of its own says itself what it runs at
    rated = msgspec.structs.replace(slow, name="h100_rated", peak_flops={**H100.peak_flops, "bf16": 500e12})
    assert costs.price(work, rated).seconds > costs.price(work, slow).seconds
    # bytes per second are not the cores' clock
    copy = Elementwise(num_bytes=1e9, fused=True)
    assert costs.price(copy, slow).seconds == costs.price(copy, H100).seconds


@pytest.mark.parametrize(
    "said, profile",
    [
        ("megatron-bridge 25.11", "megatron-bridge"),
        ("megatron-bridge 26.04.01 zero1", "megatron-bridge-2026"),
        ("megatron-bridge 26.06.01", "megatron-bridge-26.06"),
        ("megatron-lm zero3", "deepspeed"),
        ("megatron-lm@2021", "megatron-lm"),
        ("megatron-lm zero1", "megatron-lm-v3"),
        ("megatron-lm zero2 selective", "megatron-lm-v3"),
        ("megatron-lm sp", "megatron-lm-v3"),
        ("megatron-lm sp selective", "megatron-lm-v3"),
        ("megatron-lm zero3 selective", "deepspeed"),
        ("megatron-bridge 26.04.01 zero1 sp", "megatron-bridge-2026"),
        ("megatron-deepspeed", "megatron-deepspeed"),
        ("torchtitan compile", "torchtitan-compile"),
        ("torchtitan", "torchtitan"),
        ("megatron-deepspeed zero1", "deepspeed"),
        ("Megatron_LM sp", "megatron-lm-v3"),
        ("nanotron era_C", "nanotron-slow-steps"),
    ],
)
def test_a_version_or_what_it_shards_chooses_the_profile(said, profile):
    assert load_framework(said).name == profile


def test_steps_pin_six_constants_of_a_profile_at_most():
    """Of those that calibrating may write; what a profile leaves at its start was not fitted."""
    of_memory = ("activation_copies", "allocator_slack", "ahead_layers")
    usual = Framework(name="")
    for profile in frameworks().values():
        own = [name for name in of_memory if getattr(profile, name) != getattr(usual, name)]
        assert len(own) + len(profile.pinned) <= 6, profile.name
        assert set(profile.pinned) <= set(framework_fit.CONSTANTS)


def test_operands_of_8_bits_are_written_twice_where_a_weight_gradient_follows():
    """128 tokens from 64 to 256 features: of the input 2 bytes read and 1 written forward, of the output's gradient as
    many backward, and 1 each for the transposes that the weight gradient multiplies; a frozen base has none."""
    quantised = Train(global_batch=8, seq_len=S, dtype="fp8")
    frozen = msgspec.structs.replace(quantised, lora=Lora(rank=4), phase="lora")
    for train, transposes in ((quantised, S * (64 + 256)), (frozen, 0)):
        made = linear(context(parse("dp1 mb1"), GPT, train), "x", 256, 64)
        (found,) = (piece for piece in made if piece.name == "x quantise")
        assert found.forward.num_bytes == S * 64 * 3 and found.backward.num_bytes == S * 256 * 3 + transposes


def test_megatron_bridge_sorts_tokens_in_one_kernel_however_many_its_other_chains_are():
    sort = Elementwise(num_bytes=1e9, kernels=2, operator=PERMUTE)
    one = standard(msgspec.structs.replace(load_framework("megatron-bridge"), elementwise_passes=2.0))
    other = standard(msgspec.structs.replace(load_framework("torchtitan"), elementwise_passes=2.0))
    assert (one.passes(sort), other.passes(sort)) == (1.0, 2.0)
