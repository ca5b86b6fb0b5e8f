"""Parameter counts: against published counts, and against the explicit tensors of a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.spec.architecture import stack
from meshwright.spec.families.parts import ends
from meshwright.spec.model import Attention, Block, Dense, Model, Moe, load
from tests.spec_model.model_tensors import count, tensors

# Counts of the published checkpoints, to the last parameter. All but dbrx and those with a remark are also what the
# public modelling code (Hugging Face transformers 5.23) holds when instantiated from the same dimensions on the meta
# device.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo": 12_247_782_400,
    "mistral-large-2": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,  # the main model with the router's selection biases, without the MTP layer
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-3.5-moe": 41_873_153_344,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "bert-base": 109_514_298,
    "bert-large": 336_226_108,  # with the heads of its pre-training
    "vit-base-patch16": 86_567_656,
    "vit-large-patch16": 304_326_632,
    "clip-vit-large-patch14": 427_616_513,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-v1.1-xxl": 11_135_332_352,  # its head has a matrix of its own, which transformers 5.23 ties
    "bart-large": 406_291_456,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without the layer that predicts further tokens
    "qwen3.5-27b": 26_895_998_464,  # the text model
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,  # with the router's selection biases, 128 in each of 23 mixtures
    "jamba-v0.1": 51_570_323_328,
    "mamba-codestral-7b": 7_285_403_648,
    "mamba2-2.7b": 2_702_599_680,
    "mamba-2.8b": 2_768_345_600,
    "zamba2-2.7b": 2_662_214_560,
    "llava-1.5-7b": 7_063_427_072,
    "mpt-7b": 6_649_286_656,
    "yi-34b": 34_388_917_248,
    "dbrx": 131_596_523_520,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_checkpoint(name: str) -> None:
    assert load(name).num_params == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in catalog.names("models") if load(name).is_decoder])
def test_every_catalog_model_counts_as_many_parameters_as_its_tensors_hold(name: str) -> None:
    model = load(name)
    assert model.num_params == count(tensors(model))


# Megatron-LM (2104.04473) gives P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), its equation 2, and Table 1 the result
# in billions; the formula leaves out only the final norm of 2 h.
SC21 = {
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-529.6b": 529.6,
    "megatron-1t": 1008.0,
}


@pytest.mark.parametrize("name", SC21)
def test_megatron_models_follow_the_papers_parameter_formula(name: str) -> None:
    model = load(name)
    layers, h = model.num_layers, model.hidden
    assert model.num_params - 2 * h == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h
    assert round(model.num_params / 1e9, 1) == SC21[name]


# Activated parameters in billions as the papers round them: Mixtral (2401.04088) section 1, DeepSeek-V2 (2405.04434)
# and V3 (2412.19437) abstracts, Qwen3 (2505.09388) Table 2, DBRX and Llama 4 model cards, Kimi K2 (2507.20534).
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 13),
        ("mixtral-8x22b", 39),
        ("deepseek-v2", 21),
        ("qwen3-235b-a22b", 22),
        ("llama4-scout", 17),
        ("llama4-maverick", 17),
        ("dbrx", 36),
        ("qwen3-coder-480b-a35b", 35),
    ],
)
def test_active_parameters_round_to_the_published_figure(name: str, billions: int) -> None:
    assert round(load(name).active_params / 1e9) == billions


# gpt-oss model card (2508.10925) Table 1: active parameters in billions, without the embedding.
@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_gpt_oss_active_parameters_without_embedding_match_the_model_card(name: str, billions: float) -> None:
    model = load(name)
    assert round((model.active_params - model.embedding_params) / 1e9, 2) == billions


SIZES = st.integers(1, 40)
FLAGS = st.booleans()


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    groups, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    latent = draw(st.sampled_from([0, 0, 12]))
    rope = draw(st.integers(1, 6)) if latent else 0
    head_dim = draw(SIZES) + rope
    indexed = draw(FLAGS)
    return Attention(
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(SIZES),
        rotary=draw(FLAGS),
        q_lora_rank=draw(st.sampled_from([0, 10])),
        kv_lora_rank=latent,
        rope_head_dim=rope,
        qkv_bias=draw(FLAGS),
        out_bias=draw(FLAGS),
        qk_norm_params=draw(st.sampled_from([0, 2 * head_dim])),
        sinks=draw(FLAGS),
        key_as_value=draw(FLAGS),
        index_heads=3 if indexed else 0,
        index_head_dim=7 if indexed else 0,
    )


DENSE = st.builds(Dense, ffn=SIZES, gated=FLAGS, bias=FLAGS, activation=st.just("silu"))
MOE = st.builds(
    Moe,
    experts=st.integers(1, 6),
    top_k=st.just(1),
    ffn=SIZES,
    gated=FLAGS,
    activation=st.just("silu"),
    shared_ffn=st.integers(0, 20),
    bias=FLAGS,
    router_bias=FLAGS,
    shared_gate=FLAGS,
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    vectors = draw(st.integers(0, 2))
    block = st.builds(
        Block,
        attention=attentions(),
        mlp=DENSE | MOE,
        norm=st.sampled_from(["rmsnorm", "layernorm"]),
        norms=st.integers(1, 4),
        norm_vectors=st.just(vectors),
        scale_params=st.integers(0, 5),
    )
    kinds = draw(st.lists(block, min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    blocks, pattern = stack(layers)
    embedding, head = ends(
        draw(SIZES),
        vectors,
        tied=draw(FLAGS),
        learned_positions=draw(st.integers(0, 30)),
        embedding_norm=draw(FLAGS),
        embedding_width=draw(st.integers(0, 9)),
        final_norm=draw(FLAGS),
        head_bias=draw(FLAGS),
    )
    return Model(
        name="drawn",
        family="drawn",
        hidden=draw(SIZES),
        embedding=embedding,
        blocks=blocks,
        pattern=pattern,
        head=head,
        max_seq_len=32,
    )


@given(models())
@settings(max_examples=200, deadline=None)
def test_parameter_count_is_the_sum_over_all_tensors(model: Model) -> None:
    assert model.num_params == count(tensors(model))


@given(models())
@settings(max_examples=100, deadline=None)
def test_parts_add_up_and_active_parameters_leave_out_only_unrouted_experts(model: Model) -> None:
    stacked = sum(model.block_params(kind).total for kind in model.pattern)
    assert model.num_params == model.embedding_params + stacked + model.final_norm_params + model.head_params
    routed = sum(model.block_params(kind).experts for kind in model.pattern)
    assert model.num_params - routed <= model.active_params <= model.num_params
    if not any(isinstance(block.mlp, Moe) for block in model.blocks):
        assert model.active_params == model.num_params
