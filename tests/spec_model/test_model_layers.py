"""What the readers make of published configurations: layers, windows, caches, from the papers."""

from __future__ import annotations

import msgspec
import pytest

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.model import Dense, Moe, _entry_config, from_config, load, transformer


def test_every_catalog_model_is_understood_whole_and_names_its_source() -> None:
    for name in catalog.names("models"):
        model = load(name)
        assert model.unknown_fields == (), name
        assert model.source and not model.source.startswith("catalog/"), name
        assert model.name == name


def test_aliases_mean_one_model_each_and_hide_no_name() -> None:
    aliases = [alias for name in catalog.names("models") for alias in _entry_config(name).get("_aliases", [])]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(catalog.names("models"))
    assert all(alias == alias.lower() for alias in aliases)


def test_names_do_not_depend_on_case_and_aliases_lead_to_their_model() -> None:
    assert load("Llama3-70B") == load("llama3-70b")
    assert load("llama3-405b").name == "llama3.1-405b"
    assert load("deepseek-r1").name == "deepseek-v3"
    assert load("meta-llama/Llama-3.1-8B").name == "llama3.1-8b"


def test_names_of_checkpoints_mean_the_model_that_they_are_trained_or_stored_from_and_say_so() -> None:
    for name, model, stored in (
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama3.1-8b", "fp8"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b", ""),
        ("google/gemma-2-9b-it", "gemma2-9b", ""),
        ("nvidia/Llama-3_3-70B-Instruct-NVFP4", "llama3.3-70b", "nvfp4"),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "qwen2.5-14b", "awq"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b", ""),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", ""),
    ):
        found, plain = load(name), load(model)
        assert msgspec.structs.replace(found, notes=plain.notes) == plain
        (told,) = set(found.notes) - set(plain.notes)
        assert repr(name) in told and (f"stored as {stored} only if the plan says so" in told) == bool(stored)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",  # another model
        "mistralai/Mistral-7B-Instruct-v0.3",  # without the window of v0.1
        "llama-3-3b",  # not the 33 billion of LLaMA
        "bert-base-cased",  # another vocabulary
        "bert",  # of two sizes
    ],
)
def test_names_that_may_mean_another_model_are_not_read(name: str) -> None:
    with pytest.raises(MeshwrightError, match="M006"):
        load(name)


def test_llama3_70b_has_the_papers_layers() -> None:
    # The Llama 3 herd of models (2407.21783), Table 3
    model = load("llama3-70b")
    block = model.block(0)
    assert (model.num_layers, model.hidden, len(model.blocks)) == (80, 8192, 1)
    assert (block.attention.heads, block.attention.kv_heads, block.attention.head_dim) == (64, 8, 128)
    assert isinstance(block.mlp, Dense) and block.mlp.ffn == 28672 and block.mlp.gated
    assert not model.tied_embeddings and model.vocab == 128256


def test_deepseek_v3_has_three_dense_layers_and_caches_576_numbers_per_token() -> None:
    # DeepSeek-V3 (2412.19437), section 4.2: all but the first three layers are mixtures of 1 shared and 256 routed
    # experts of width 2048, 8 of them active; section 2.1.1: the latent of 512 and the rotary key of 64 are cached.
    model = load("deepseek-v3")
    assert model.layers_by_kind == (3, 58)
    dense, sparse = model.blocks
    assert isinstance(dense.mlp, Dense) and dense.mlp.ffn == 18432
    assert isinstance(sparse.mlp, Moe)
    assert (sparse.mlp.experts, sparse.mlp.top_k, sparse.mlp.ffn, sparse.mlp.shared_ffn) == (256, 8, 2048, 2048)
    assert sparse.attention.kv_width == 576


def test_grouped_queries_cache_keys_and_values_of_the_kv_heads() -> None:
    assert load("llama3-8b").block(0).attention.kv_width == 2 * 8 * 128


def test_gemma_2_alternates_windows_and_gemma_3_keeps_every_sixth_layer_full() -> None:
    # Gemma 2 (2408.00118) section 2 and Gemma 3 (2503.19786) section 2
    gemma2, gemma3 = load("gemma2-9b"), load("gemma3-27b")
    assert [gemma2.block(i).attention.window for i in range(4)] == [4096, 0, 4096, 0]
    assert [gemma3.block(i).attention.window for i in range(7)] == [1024] * 5 + [0] + [1024]


def test_llama_4_attends_in_chunks_except_in_every_fourth_layer_which_has_no_positions() -> None:
    # Llama 4 model card: iRoPE; Maverick alternates dense and expert layers, Scout has experts in all
    maverick, scout = load("llama4-maverick"), load("llama4-scout")
    attentions = [maverick.block(i).attention for i in range(4)]
    assert [(a.window, a.chunked, a.rotary) for a in attentions] == [(8192, True, True)] * 3 + [(0, False, False)]
    assert [isinstance(maverick.block(i).mlp, Moe) for i in range(4)] == [False, True, False, True]
    assert all(isinstance(block.mlp, Moe) for block in scout.blocks)


def test_glm_5_2_shares_each_indexers_choice_with_three_more_layers() -> None:
    # zai-org/GLM-5.2 lists indexer_types: three full, then full every fourth layer from layer 6
    model = load("glm-5.2")
    own = [layer for layer in range(model.num_layers) if model.block(layer).attention.index_heads]
    assert own == [0, 1, 2, *range(6, 78, 4)]
    assert all(block.attention.index_top_k == 2048 for block in model.blocks)
    pattern = "".join("F" if layer in own else "S" for layer in range(model.num_layers))
    assert load("glm-5.2", index_topk_pattern=pattern).pattern == model.pattern


def test_a_mistral_window_is_4096_unless_said_otherwise_and_null_is_none() -> None:
    # Mistral 7B (2310.06825), Table 1
    config = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    assert from_config(config).block(0).attention.window == 4096
    assert from_config({**config, "sliding_window": None}).block(0).attention.window == 0
    assert load("mistral-7b").block(0).attention.window == 4096


def test_opt_stores_two_positions_more_and_the_350m_projects_its_embedding() -> None:
    # OPT (2205.01068) release: facebookresearch/metaseq
    assert load("opt-125m").learned_positions == 2050
    small = load("opt-350m")
    assert small.embedding.width == 512 and small.hidden == 1024 and not small.head.norm_vectors


def test_falcon_7b_shares_one_key_value_head_and_180b_groups_eight() -> None:
    # Falcon (2311.16867), Table 14
    seven, large = load("falcon-7b").block(0), load("falcon-180b").block(0)
    assert (seven.attention.kv_heads, seven.norms, seven.parallel) == (1, 1, True)
    assert (large.attention.kv_heads, large.norms, large.parallel) == (8, 2, True)


def test_a_multimodal_configuration_yields_its_text_model_with_a_note() -> None:
    text = {"model_type": "qwen3_vl_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True,
             "vision_config": {"depth": 3}, "strange_part": 1}  # fmt: skip
    model = from_config(outer)
    assert model.num_layers == 2 and model.tied_embeddings
    assert "text model alone" in model.notes[0]
    assert model.unknown_fields == ("strange_part",)


def test_unknown_keys_are_reported_and_known_ones_without_effect_are_not() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100, "rope_theta": 1e4, "torch_dtype": "bfloat16",
              "bos_token_id": 1, "attention_dropout": 0.0, "warp_factor": 9}  # fmt: skip
    assert from_config(config).unknown_fields == ("warp_factor",)


def test_an_override_changes_the_configuration_it_is_given_for() -> None:
    assert load("llama3-8b", num_hidden_layers=2).num_layers == 2
    assert load("gpt2", n_layer=3).num_layers == 3


def test_a_folder_and_a_file_are_both_read(tmp_path) -> None:
    text = catalog.folder("models").joinpath("gpt2.json").read_text(encoding="utf-8")
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert load(folder).name == load(str(folder / "config.json")).name == "my-gpt"
    assert load(folder).num_params == 124_439_808


def test_dimensions_of_gpt_3_build_the_catalogs_gpt_3() -> None:
    built = transformer(layers=96, hidden=12288, heads=96, vocab=50257, max_seq_len=2048)
    listed = load("gpt3-175b")
    assert built.num_params == listed.num_params
    assert built.block_params(0) == listed.block_params(0)


def test_dimensions_of_llama_and_qwen_moe_build_their_counts() -> None:
    llama = transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, gated=True)
    qwen = transformer(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, gated=True,
                       experts=128, top_k=8, moe_ffn=768, qk_norm=True)  # fmt: skip
    assert llama.num_params == 8_030_261_248
    assert qwen.num_params == 30_532_122_624
    assert qwen.active_params == load("qwen3-30b-a3b").active_params


def test_first_dense_layers_of_a_mixture_keep_the_dense_width() -> None:
    model = transformer(layers=4, hidden=64, heads=4, vocab=100, ffn=256, gated=True, experts=8, top_k=2, moe_ffn=32,
                        shared_ffn=32, dense_layers=1)  # fmt: skip
    assert model.pattern == (0, 1, 1, 1)
    assert isinstance(model.block(0).mlp, Dense) and isinstance(model.block(1).mlp, Moe)
