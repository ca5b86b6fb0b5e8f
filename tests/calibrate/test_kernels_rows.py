"""Rows of op tables become the work items that lowering writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.calibrate.loads import busiest
from meshwright.calibrate.rows import measured, pairs
from meshwright.calibrate.tables import TableRow


def row(text, **number):
    return TableRow(2, {"backend": "any", **text}, {"batch": 1, "latency_us": 10.0, **number})


def test_a_backward_product_is_input_gradient_and_weight_gradient_together():
    found = measured("ops_gemm", row({"dtype": "fp16", "pass": "bwd"}, m=1024, n=768, k=256))
    assert [(w.m, w.n, w.k) for w in found.kernels] == [(1024, 256, 768), (256, 768, 1024)]
    assert sum(w.flops for w in found.kernels) == 4 * 1024 * 768 * 256
    assert found.group == (768, 256)


def test_an_fp8_product_contains_the_quantisation_of_its_input():
    # bf16 read, fp8 written: 3 bytes an element of A
    found = measured("ops_gemm", row({"dtype": "fp8", "pass": "fwd"}, m=128, n=64, k=32))
    assert [e.num_bytes for e in found.around] == [128 * 32 * 3]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50))
def test_pairs_under_a_mask_are_those_counted_one_by_one(q_len, cached, window):
    kv_len = q_len + cached
    counted = sum(min(cached + i + 1, window or kv_len) for i in range(q_len))
    assert pairs(q_len, kv_len, causal=True, window=window) == counted
    assert pairs(q_len, kv_len, causal=False, window=0) == q_len * kv_len


def test_an_fp8_cache_makes_an_fp8_kernel():
    text = {"phase": "prefill", "dtype": "bf16", "kv_dtype": "fp8", "causal": "True"}
    found = measured("ops_attention", row(text, q_len=8, kv_len=8, heads=4, kv_heads=2, head_dim=64, window=0))
    assert (found.op, found.dtype, found.kernels[0].pairs) == ("prefill", "fp8", 36)


def test_even_experts_share_tokens_and_no_more_of_them_work_than_tokens_there_are():
    assert busiest(1024, 64, 8, 8, 0.0) == (1024.0, 8.0)
    assert busiest(1, 64, 2, 8, 0.0) == (1.0, 1.0)


@given(st.sampled_from([16, 256, 4096]), st.sampled_from([1, 4, 16]), st.sampled_from([1.01, 1.2]))
def test_the_busiest_rank_has_at_least_its_share_and_no_expert_a_token_twice(tokens, ep, alpha):
    rows, active = busiest(tokens, 64, 8, ep, alpha)
    # rounding each expert to whole tokens moves up to half a token an expert
    assert tokens * 8 / ep - 64 <= rows <= tokens * active + 64
    assert 1 <= active <= 64 // ep


def test_a_layer_of_experts_is_its_two_grouped_products_of_one_rank():
    text = {"dtype": "bf16", "gated": "True", "distribution": "balanced"}
    found = measured("ops_moe", row(text, tokens=512, hidden=1024, ffn=2048, experts=16, top_k=2, tp=4, ep=2))
    up, down = found.kernels
    # 512 * 2 / 2 rows, 8 experts, 2048 / 4 columns twice for the gate
    assert (up.rows, up.groups, up.n, up.k) == (512, 8, 1024, 1024)
    assert (down.rows, down.groups, down.n, down.k) == (512, 8, 1024, 512)
    assert found.seconds == pytest.approx(1e-5)
