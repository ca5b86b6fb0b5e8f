"""Kernels of serving engines alone: one query over a compressed cache, and devices whose tables no training uses."""

import pytest

from meshwright.calibrate.rows import asked, measured
from meshwright.calibrate.tables import TableRow
from meshwright.cost.fitted import link, profiles
from meshwright.spec.cluster import load_device
from meshwright.work import AttentionCore, Gemm, GroupedGemm

SERVE, TRAIN, FUSED = link(serving=True), link(), link(serving=True, fused=True)
TEXT = {"source": "aiconfigurator", "hardware": "h200_sxm", "backend": "trtllm", "backend_version": "1.3.0rc20"}
SIZES = {"batch": 64, "heads": 16, "kv_len": 4096, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "latency_us": 90.9}
SIZES |= {"qk_nope_head_dim": 128, "v_head_dim": 128}


def row(scope="kernel", phase="decode", kv="bf16"):
    return TableRow(2, TEXT | {"scope": scope, "phase": phase, "dtype": "bf16", "kv_dtype": kv}, dict(SIZES))


def latent(batch, keys, heads, dtype="bf16"):
    return AttentionCore(
        batch=batch, q_len=1, kv_len=keys, heads=heads, kv_heads=1, head_dim=576, v_head_dim=512, pairs=keys,
        dtype=dtype,
    )  # fmt: skip


def test_a_row_over_a_compressed_cache_is_the_core_that_decoding_lowers_to():
    found = measured("ops_mla", row())
    assert found.kernels == (latent(64, 4096, 16),) and (found.op, found.dtype) == ("latent", "bf16")
    assert measured("ops_mla", row(kv="fp8")).dtype == "fp8" and found.serving


@pytest.mark.parametrize(("scope", "phase"), [("module", "decode"), ("module", "prefill"), ("bmm_pre", "decode")])
def test_whole_layers_and_products_are_not_that_kernel(scope, phase):
    assert measured("ops_mla", row(scope, phase)) is None


def expanded(batch, tokens, heads, dtype="bf16"):
    return AttentionCore(
        batch=batch, q_len=tokens, kv_len=tokens, heads=heads, kv_heads=heads, head_dim=192, v_head_dim=128,
        pairs=tokens * (tokens + 1) / 2, dtype=dtype,
    )  # fmt: skip


def test_a_prompt_expands_the_latent_for_every_head():
    found = measured("ops_mla", row(phase="prefill"))
    assert found.kernels == (expanded(64, 4096, 16),) and found.op == "expanded"


@pytest.mark.parametrize(("device", "us"), [("h100_sxm", 1211.7), ("b200_sxm", 595.4)])
def test_a_prompt_of_latent_attention_takes_what_its_table_says(device, us):
    found = SERVE(expanded(1, 8192, 32), load_device(device))
    assert found.seconds == pytest.approx(us * 1e-6, rel=0.15) and " expanded " in found.source


def test_the_products_around_a_latent_are_priced_and_not_fitted():
    (product,) = asked("ops_mla", row("bmm_post")).kernels
    assert (product.batch, product.m, product.n, product.k) == (16, 64, 128, 512)
    assert asked("ops_mla", row("module")) is None


# Rows of ops_mla.csv.gz, TensorRT-LLM 1.3.0rc20: (sequences, keys, heads, cache), microseconds.
MEASURED = [
    ("h200_sxm", (64, 4096, 16, "bf16"), 90.9),
    ("h200_sxm", (64, 4096, 16, "fp8"), 70.3),
    ("h200_sxm", (128, 16384, 16, "bf16"), 568.9),
    ("b200_sxm", (64, 4096, 16, "bf16"), 72.8),
    ("b200_sxm", (128, 16384, 16, "fp8"), 196.8),
]


@pytest.mark.parametrize(("device", "shape", "us"), MEASURED)
def test_one_query_over_a_compressed_cache_takes_what_its_table_says(device, shape, us):
    found = SERVE(latent(*shape), load_device(device))
    assert found.seconds == pytest.approx(us * 1e-6, rel=0.2) and " latent " in found.source


def test_a_latent_is_read_once_for_all_heads():
    # twice the heads are twice the products over the same bytes: far from twice the time where bytes decide
    few, many = (SERVE(latent(128, 8192, heads), load_device("h200_sxm")).seconds for heads in (8, 16))
    assert many < 1.1 * few


def test_tables_of_serving_kernels_alone_do_not_price_training():
    work, device = Gemm(m=4096, n=8192, k=8192), load_device("b200_sxm")
    assert (
        SERVE(work, device).source.startswith("fitted: b200_sxm gemm bf16") and TRAIN(work, device).source == "roofline"
    )
    assert {"b200_sxm", "gb200", "l40s", "rtx_pro_6000_server"} == set(profiles(serving=True)[0]) - set(profiles()[0])


def test_a_product_of_fused_operands_starts_as_one_of_16_bits():
    # the B200's rows in fp8 contain a kernel that quantises: 12.1 us before anything is multiplied, 2.0 us in bf16
    work, device = Gemm(m=16, n=1280, k=1024, dtype="fp8"), load_device("b200_sxm")
    apart, fused = (which(work, device).seconds for which in (SERVE, FUSED))
    assert 9e-6 < apart - fused < 11e-6
    wide = Gemm(m=16, n=1280, k=1024)
    assert SERVE(wide, device).seconds == FUSED(wide, device).seconds


ENGINE = link(serving=True, fused=True, fastest=True)
MIXTURE = {"tokens": 64, "hidden": 2880, "ffn": 2880, "experts": 128, "top_k": 4, "tp": 1, "ep": 1, "latency_us": 300.0}


@pytest.mark.parametrize(
    ("dtype", "multiplied", "stored", "curve"),
    [
        ("w4a8_mxfp4_mxfp8", "mxfp8", "mxfp4", "mxfp8_mxfp4"),
        ("w4a16_mxfp4", "bf16", "mxfp4", "mxfp4_wo"),
        ("int4_wo", "bf16", "int4", "int4_wo"),
        ("nvfp4", "nvfp4", "", "nvfp4"),
    ],
)
def test_experts_stored_in_fewer_bits_than_their_tokens_have_a_curve_of_both_formats(dtype, multiplied, stored, curve):
    text = TEXT | {"dtype": dtype, "gated": "True", "distribution": "balanced"}
    found = measured("ops_moe", TableRow(2, text, dict(MIXTURE)))
    assert found.dtype == curve and {(k.dtype, k.weights) for k in found.kernels} == {(multiplied, stored)}


def experts(rows, dtype, weights=""):
    return GroupedGemm(groups=min(rows, 128), rows=rows, n=5760, k=2880, dtype=dtype, weights=weights)


def test_experts_of_four_bits_run_the_faster_kernel_in_an_engine_and_their_own_in_a_table():
    b200, few = load_device("b200_sxm"), experts(16, "nvfp4")
    own, engine = SERVE(few, b200), ENGINE(few, b200)
    assert " grouped_gemm nvfp4 " in own.source and " grouped_gemm mxfp8_mxfp4 " in engine.source
    assert engine.seconds < 0.7 * own.seconds
    assert ENGINE(experts(16, "bf16", "mxfp4"), b200).source == engine.source


def test_experts_in_mxfp4_are_priced_by_the_faster_of_two_kernels_of_16_bits_and_others_by_their_nearest():
    h100, work = load_device("h100_sxm"), experts(16, "bf16", "mxfp4")
    assert " mxfp4_wo " in SERVE(work, h100).source and " int4_wo " in ENGINE(work, h100).source
    assert "a100_80gb_sxm grouped_gemm int4_wo" in SERVE(work, load_device("a100_80gb_sxm")).source
    assert " grouped_gemm bf16 " in SERVE(experts(16, "bf16", "fp8"), h100).source


def decoded(dtype, keys=8192, pairs=8192.0):
    return AttentionCore(
        batch=64, q_len=1, kv_len=keys, heads=8, kv_heads=1, head_dim=128, v_head_dim=128, pairs=pairs, dtype=dtype
    )


def test_flash_attention_3_reads_eight_bits_little_sooner_than_sixteen():
    hopper, blackwell = load_device("h100_sxm"), load_device("b200_sxm")
    for library in ("vllm", "sglang"):
        priced = link(serving=True, library=library)
        # 8,192 keys of 8 bits take as long as 8,192 / 1.39 of 16
        found = priced(decoded("fp8"), hopper)
        as_long = priced(decoded("bf16", 5894, 8192 / 1.39), hopper)
        assert found.seconds == pytest.approx(as_long.seconds, rel=1e-3)
        assert priced(decoded("bf16"), hopper).seconds == SERVE(decoded("bf16"), hopper).seconds
        assert priced(decoded("fp8"), blackwell).seconds == SERVE(decoded("fp8"), blackwell).seconds
        assert priced(latent(64, 8192, 16, "fp8"), hopper).seconds == SERVE(latent(64, 8192, 16, "fp8"), hopper).seconds
    own, vllm = (link(serving=True, library=name)(decoded("fp8"), hopper).seconds for name in ("trtllm", "vllm"))
    assert own == SERVE(decoded("fp8"), hopper).seconds < 0.8 * vllm
