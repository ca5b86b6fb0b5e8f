"""What is predicted and not trained: each refusal says what, where, and the nearest plan that runs."""

import pytest

from meshwright import catalog
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import from_config, load
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as workload

LLAMA = transformer(layers=4, hidden=64, heads=4, vocab=128, ffn=128, gated=True)
MOE = transformer(layers=4, hidden=64, heads=4, vocab=128, ffn=128, gated=True, experts=4, top_k=2)
TRAIN = Train(global_batch=8, seq_len=64)
TUNED = workload("batch=8,seq=64,phase=lora")
REFUSED = [
    ("dp2", load("glm-5"), TRAIN, "P030", "glm_moe_dsa family"),
    ("dp2", load("gpt-oss-20b"), TRAIN, "P030", "families that are"),
    ("dp2", load("gpt2"), workload("batch=8,seq=64,targets=q+v"), "P031", "c_attn, which has one adapter or none"),
    ("dp2", MOE, workload("batch=8,seq=64,targets=all"), "P031", "mixtures of experts"),
    ("dp2", LLAMA, workload("batch=8,seq=64,targets=q+experts_up"), "P031", "it has no experts"),
    ("dp2", LLAMA, workload("batch=8,seq=64,targets=kv_up"), "P031", "keys and values are made of no latent"),
    ("tp2", MOE, workload("batch=8,seq=64,targets=experts_up"), "P033", "layout.tp = 2"),
    ("dp2", MOE, workload("batch=8,seq=64,targets=experts_up,lora_dropout=0.1"), "P031", "have no dropout"),
    ("tp2 overlap=tp", LLAMA, TUNED, "P033", "their input is made whole"),
    ("dp2 sync=local:h=2,codec=int8", LLAMA, TUNED, "P033", "adapters under sync=local"),
    ("full recompute_portions=2", LLAMA, TUNED, "P033", "adapters in portions"),
    (
        "dp2 params=nf4",
        transformer(layers=1, hidden=96, heads=4, vocab=64, ffn=128, gated=True),
        TUNED,
        "P033",
        "hidden=96",
    ),
    (
        "tp2 params=int4",
        transformer(layers=1, hidden=128, heads=4, vocab=64, ffn=256, gated=True),
        TUNED,
        "P033",
        "tp of 1",
    ),
    ("dp2", LLAMA, Train(global_batch=8, seq_len=64, optimizer="muon"), "P031", "say one of adamw"),
    ("dp2", LLAMA, Train(global_batch=8, seq_len=64, dtype="mxfp8"), "P032", "'dp2 mb1 fp8'"),
    ("dp2 grads=fp16", LLAMA, TRAIN, "P032", "grads=fp16"),
    ("dp2 unfused", LLAMA, TRAIN, "P033", "unfused attention"),
    ("tp2 nosp overlap=tp", LLAMA, TRAIN, "P033", "without sequence parallelism"),
    ("tp2 overlap=tp:domino", LLAMA, TRAIN, "P033", "with sequence parallelism"),
    ("tp2 nosp overlap=tp:domino2x2", LLAMA, TRAIN, "P033", "by columns"),
    ("tp2 overlap=tp:triggered", LLAMA, TRAIN, "P033", "by memory that starts exchanges"),
    ("tp2 nosp full overlap=tp:domino", LLAMA, TRAIN, "P033", "selective"),
    ("tp2 nosp zero3 overlap=tp:domino", LLAMA, TRAIN, "P033", "zero2"),
    ("tp2 nosp overlap=tp:domino", MOE, TRAIN, "P033", "mixtures of experts"),
    ("tp2 pp2 nosp overlap=tp:ladder", LLAMA, TRAIN, "P033", "which pass on one stream"),
    ("dp2 zero3", MOE, TRAIN, "P033", "zero2"),
    ("dp2 loss=fused", LLAMA, TRAIN, "P033", "'fused'"),
    ("dp2 loss=in-place", LLAMA, TRAIN, "P033", "'in-place'"),
    ("dp2 loss_portions=2", load("bert-base"), TRAIN, "P033", "in portions"),
    ("dp2 operators", LLAMA, TRAIN, "P033", "recompute by operators"),
]


@pytest.mark.parametrize(("words", "model", "train", "code", "said"), REFUSED, ids=[f"{c[3]} {c[0]}" for c in REFUSED])
def test_what_cannot_be_trained_is_refused_with_the_nearest_that_can(words, model, train, code, said):
    found = [d for d in unexecutable(parse(words), model, train) if d.code == code]
    text = "\n".join(map(str, found))
    assert found and said in text, text
    assert all(d.place and d.help for d in found)


@pytest.mark.parametrize("words", ["dp2", "tp2 pp2 dp2 zero1", "cp4 ulysses2", "pp2 chimera", "dp2 zero3", "selective"])
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b", "gpt2", "mixtral-8x7b", "gemma2-9b", "phi-4"])
def test_what_the_equality_tests_cover_is_not_refused(words, name):
    if "zero3" in words and name == "mixtral-8x7b":
        pytest.skip("fully sharded experts are refused")
    assert unexecutable(parse(words), load(name), TRAIN) == []


def test_the_nearest_plan_is_executable():
    for words, model, train, code, _ in REFUSED:
        for found in unexecutable(parse(words), model, train):
            if code in ("P032", "P033") and "runs: '" in found.help:
                nearest = parse(found.help.split("runs: ")[1].strip("'"))
                assert found.message not in [d.message for d in unexecutable(nearest, model, train)]


def test_every_code_of_the_matrix_is_raised_here():
    assert {c[3] for c in REFUSED} == {c for c in catalog.tables("codes") if "P030" <= c <= "P039"}


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 128,
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
}


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DEEPSEEK | {"n_group": 3}, "3 groups (n_group) do not divide its 16 experts"),
        (DEEPSEEK | {"n_group": 8, "topk_group": 1}, "1 of 8 groups (topk_group, n_group) have no 4 of its 16 experts"),
        (DEEPSEEK | {"n_group": 16, "topk_group": 8}, "16 groups (n_group) of one expert each have no two best"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "its router scores by 'softmax'"),
        (DEEPSEEK | {"topk_method": "greedy"}, "its router chooses by topk_method='greedy'"),
        (DEEPSEEK | {"model_type": "deepseek_v2", "norm_topk_prob": True}, "which DeepSeek-V2 has never done"),
        (DEEPSEEK | {"model_type": "deepseek_v2", "mlp_bias": True}, "its MLPs have biases (mlp_bias)"),
        (PHI3 | {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "its rotary scaling 'longrope' is not one of"),
        (PHI3 | {"model_type": "phi", "qk_layernorm": True}, "LayerNorm (qk_layernorm)"),
        (PHI3 | {"model_type": "gemma2", "use_bidirectional_attention": True}, "its tokens see later ones"),
        (PHI3 | {"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (PHI3 | {"model_type": "llama", "head_dim": 7}, "it rotates 7 of the 7 numbers of a head"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "it rotates 24 of the 16 numbers of a head"),
        (PHI3 | {"rope_theta": -5.0}, "rope_theta=-5 is not above 0"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor=-2 is not above 0"),
        (PHI3 | {"rms_norm_eps": -1.0}, "its norms add -1, below 0"),
        (PHI3 | {"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "(attn_logit_softcapping)"),
        (GPT2 | {"scale_attn_weights": False}, "(scale_attn_weights)"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "(scale_attn_by_inverse_layer_idx)"),
    ],
)
def test_what_a_configuration_asks_for_beyond_its_family_is_refused(config, said):
    model = from_config(config, name="small")
    assert any(said in d.message and d.code == "P030" for d in unexecutable(parse("dp2"), model, TRAIN))


def test_a_rotary_scaling_without_its_length_is_of_the_longest_and_no_number_is_taken_as_absent():
    yarn = {"type": "yarn", "factor": 4.0}

    def of(**said):
        return from_config(PHI3 | {"model_type": "llama", "max_position_embeddings": 96} | said, name="small").numerics

    # as transformers fills it in (modeling_rope_utils: original_max_position_embeddings)
    assert of(rope_scaling=yarn).rope_original == 96
    assert of(rope_scaling=yarn | {"original_max_position_embeddings": 24}).rope_original == 24
    assert of(rope_scaling=yarn | {"original_max_position_embeddings": float("nan")}).rope_original == 96
    assert of(rope_scaling={"type": "yarn", "original_max_position_embeddings": 0}).rope_original == 1
    assert of(rms_norm_eps=float("inf"), rope_theta=float("nan")) == of()


@pytest.mark.parametrize(
    ("words", "model", "said"),
    [
        ("cp2", from_config(DEEPSEEK, name="small"), "cp2 of latent attention"),
        ("tp2 overlap=tp", load("phi-2"), "overlap=tp of blocks in parallel"),
        ("full recompute_portions=2", load("phi-2"), "layers in portions of blocks in parallel"),
        (
            "tp2 nosp overlap=tp:domino",
            from_config(PHI3 | {"model_type": "olmo2"}, name="small"),
            "norms over the heads",
        ),
    ],
)
def test_what_a_plan_asks_of_some_blocks_is_refused(words, model, said):
    assert any(said in d.message and d.code == "P033" for d in unexecutable(parse(words), model, TRAIN))
