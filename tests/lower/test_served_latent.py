"""Latent attention of a serving iteration: products of hidden states and what an indexer adds, by hand."""

import pytest

import meshwright as mw
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.work import AttentionCore, Elementwise, Gemm

#: DeepSeek-V3.2: hidden 7168, latents of 1536 and 512 + 64; an indexer of 64 heads of 128 that chooses 2,048 tokens.
SPARSE, TP = "deepseek-v3.2", 8


def forward(words="tp8 fp8", model=SPARSE, device="h200"):
    cluster = mw.load_cluster(f"8x{device}")
    plan = mw.parse_plan(words).on(cluster.num_devices)
    return Forward(mw.load_model(model), plan, Mesh(plan, cluster), kv="bf16")


def chosen(found, batch, new, past):
    [mixing] = found.mixing
    return {entry.name: entry.work for entry in found.cores(mixing, batch, new, past)}


def test_a_hidden_state_goes_to_both_latents_in_one_product():
    works = {entry.name: entry.work for entry in forward(model="deepseek-v3").tokenwise(1, 16)}
    assert (works["q down"].n, works["q down"].k) == (1536 + 512 + 64, 7168)
    assert not any(name.startswith("kv down") for name in works)
    assert "kv latent norm" in works and works["kv up"].k == 512


def test_queries_that_are_not_compressed_have_a_product_of_their_own():
    works = {entry.name for entry in forward("tp1 bf16", "deepseek-v2-lite").tokenwise(1, 16)}
    assert {"q", "kv down"} <= works


def test_an_indexer_is_whole_on_every_rank():
    for words in ("tp1 fp8", "tp8 fp8"):
        works = {entry.name: entry.work for entry in forward(words).tokenwise(1, 16)}
        shapes = {name: (w.m, w.n, w.k) for name, w in works.items() if name.startswith("index") and type(w) is Gemm}
        assert shapes == {
            "index q": (16, 64 * 128, 1536),
            "index k": (16, 128, 7168),
            "index weights": (16, 64, 7168),
        }
        turned = works["index rotary"]  # queries and keys are rotated, transformed and cast; keys are normed before
        assert (turned.kernels, turned.num_bytes) == (7, 3 * 2 * 16 * (64 + 1) * 128 * 2.0)
    assert not any(e.name.startswith("index") for e in forward(model="deepseek-v3").tokenwise(1, 16))


def test_decoding_scores_every_earlier_token_and_attends_to_those_chosen():
    works = chosen(forward(), batch=4, new=1, past=8191)
    scores, best, core = (works[name] for name in ("index scores", "index choice", "attention"))
    assert (scores.batch, scores.m, scores.n, scores.k, scores.dtype) == (4, 64, 8192, 128, "fp8")
    # of four requests: queries of 64 heads, a key of a byte an element for each token, a score of 4 bytes
    assert scores.num_bytes == 4 * (64 * 128 + 8192 * 128 + 4 * 8192)
    assert type(best) is Elementwise and best.num_bytes == 4 * 8192 * 4 * 2
    assert core.pairs == 2048


def test_context_parallel_ranks_share_the_choice():
    """Decoding: half of the keys each, for the queries that are gathered, and the best 2,048 of both ranks with a score
    and a place of 4 bytes each. Prompts: half of the queries against all keys, which are gathered."""
    found = forward("tp4 cp2 fp8")
    works = chosen(found, batch=4, new=1, past=8191)
    assert list(works)[:4] == ["index queries gather", "index scores", "index choice", "index candidates gather"]
    assert (works["index scores"].m, works["index scores"].n) == (64, 4096)
    assert works["index queries gather"].num_bytes == 4 * 64 * 128
    assert works["index candidates gather"].num_bytes == 4 * 2 * 2048 * 8
    whole, half = (chosen(forward(words), 1, 4096, 0) for words in ("tp8 fp8", "tp4 cp2 fp8"))
    assert half["index scores"].m == whole["index scores"].m / 2 and half["index scores"].n == whole["index scores"].n
    assert half["index keys gather"].num_bytes == 4096 * 128
    [mixing] = found.mixing
    entries = found.cores(mixing, 1, 4096, 0)
    behind = [entry.after for entry in entries if entry.name.startswith("attention")]
    assert behind[0] == (2,) and all(after for after in behind[1:])  # none begins before the choice


def test_attention_of_several_kernels_chooses_too():
    assert list(chosen(forward("tp8 fp8 unfused"), 4, 1, 8191)) == [
        "index scores",
        "index choice",
        "scores",
        "softmax",
        "weighted sum",
    ]


def test_a_prompt_has_a_choice_where_it_has_more_tokens_than_a_query_attends_to():
    found = forward()
    assert "index scores" not in chosen(found, 1, 2048, 0)
    works = chosen(found, 1, 4096, 0)
    assert works["index scores"].m * works["index scores"].n == pytest.approx(64 * 4096 * 4097 / 2, rel=1e-3)


def test_prompts_of_chosen_tokens_read_the_latent_and_others_expand_it():
    found = forward()
    for new, past, heads, width, v_width in ((2048, 0, 128 // TP, 192, 128), (4096, 0, 1, 576, 512)):
        core = chosen(found, 1, new, past)["attention"]
        assert type(core) is AttentionCore
        assert (core.kv_heads, core.head_dim, core.v_head_dim) == (heads, width, v_width)


def test_ranks_with_few_heads_fill_up_the_kernel_of_sparse_prompts_on_hopper():
    # 128 / 8 = 16 heads a rank, and a kernel of 64; decoding has another kernel, as have prompts on other devices
    def heads(words, device, new, past=0):
        return chosen(forward(words, device=device), 1, new, past)["attention"].heads

    assert [heads("tp8 fp8", device, 4096) for device in ("h200", "b200")] == [64, 16]
    assert heads("tp1 fp8", "h200", 4096) == 128 and heads("tp8 fp8", "h200", 1, 4095) == 16
    assert heads("tp8 fp8", "h200", 2048) == 16  # nothing to choose from
