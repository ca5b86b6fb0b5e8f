"""Configurations of encoders, pairs and hybrids: their layers, and what is wrong with one, all at once."""

from __future__ import annotations

import json

import pytest

from meshwright import catalog
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.spec.ends import Bridge, Embedding, Features, Patches
from meshwright.spec.layers import Dense
from meshwright.spec.mixers import GatedDelta, Mamba, Mamba2
from meshwright.spec.model import config, from_config, load
from meshwright.spec.workload import parse

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


def changed(name, **values):
    """A catalog model's configuration with other values; None leaves a key out."""
    found = {**config(name), **values}
    return {key: value for key, value in found.items() if value is not None}


def faults(found):
    with pytest.raises(MeshwrightError) as caught:
        from_config(found)
    return caught.value.diagnostics


# Small models of each family: what transformers 5.23 instantiates, and what only its buffers or ties change.
SMALL = {
    "bert-base": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80},
    "vit-base-patch16": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80},
    "t5-large": {"d_model": 48, "d_ff": 80, "d_kv": 12, "num_heads": 4, "num_layers": 2},
    "bart-large": {"d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 80},
    "mamba-2.8b": {"hidden_size": 48, "num_hidden_layers": 2, "time_step_rank": "auto"},
    "mamba-codestral-7b": {"hidden_size": 48, "num_hidden_layers": 2, "num_heads": 12, "head_dim": 8, "n_groups": 4},
    "jamba-v0.1": {"hidden_size": 48, "num_hidden_layers": 8, "intermediate_size": 80, "mamba_dt_rank": 5},
    "qwen3-next-80b-a3b": {"hidden_size": 48, "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2},
    "nemotron-3-super-120b-a12b": {
        "hidden_size": 48,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_latent_size": 20,
    },
    "bamba-9b": {"hidden_size": 64, "num_hidden_layers": 5, "attn_layer_indices": [3], "mamba_d_head": "auto"},
    "granite-4.0-h-tiny": {"hidden_size": 48, "mamba_n_heads": 12, "mamba_d_head": 8, "num_local_experts": 6},
}
CLASSES = {"t5-large": "T5ForConditionalGeneration"}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_of_a_family_count_what_transformers_instantiates(name):
    found = changed(name, **SMALL[name])
    if name == "bart-large":
        found |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    if name == "jamba-v0.1":
        found |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    made = getattr(transformers, CLASSES.get(name, found["architectures"][0]))
    known = made.config_class.from_dict({k: v for k, v in found.items() if k != "architectures"})
    with torch.device("meta"):
        net = made(known)
    # numbers by which a router selects are stored as buffers there
    selecting = sum(b.numel() for name, b in net.named_buffers() if name.endswith("e_score_correction_bias"))
    assert from_config(found).num_params == sum(p.numel() for p in net.parameters()) + selecting


def test_granite_without_experts_has_the_mlp_that_all_tokens_pass():
    found = changed("granite-4.0-h-tiny", num_local_experts=0, num_experts_per_tok=0)
    assert {type(block.mlp) for block in from_config(found).blocks} == {Dense}
    assert from_config(found).blocks[0].mlp.ffn == 1024


# What transformers 5.23 instantiates, with the numbers by which routers select. Published: 9.78B (Bamba's
# documentation), 7B, 120B of which 12B are active, 550B of which 55B.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("bamba-9b", 9_780_235_392, 9.78e9),
        ("granite-4.0-h-tiny", 6_939_037_248, None),
        ("nemotron-3-super-120b-a12b", 120_668_707_840, 12e9),
        ("nemotron-3-ultra-550b-a55b", 549_308_993_536, 55e9),
    ],
)
def test_hybrids_are_as_large_as_published(name, total, active):
    found = load(name)
    assert found.num_params == total
    assert active is None or found.active_params == pytest.approx(active, rel=0.07)


def test_hybrids_have_their_layers_where_the_configuration_puts_them():
    nemotron = load("nemotron-h-56b")
    kinds = "".join(
        "M" if b.mixer else "*" if b.attention else "-" for b in map(nemotron.block, range(nemotron.num_layers))
    )
    assert kinds == config("nemotron-h-56b")["hybrid_override_pattern"]
    assert all(b.norms == 1 for b in nemotron.blocks)
    jamba = load("jamba-v0.1")
    assert [i for i in range(32) if jamba.block(i).attention] == [4, 12, 20, 28]
    assert isinstance(jamba.block(0).mixer, Mamba) and jamba.block(0).mixer.normed
    assert [type(b.mixer) for b in load("qwen3.5-27b").blocks] == [GatedDelta, type(None)]
    zamba = load("zamba2-2.7b")
    assert [i for i in range(54) if zamba.block(i).before] == [6, 12, 18, 24, 30, 36, 42, 47, 51]
    assert all(isinstance(b.mixer, Mamba2) for b in zamba.blocks)


def test_towers_end_where_the_next_one_begins():
    llava = load("llava-1.5-7b")
    assert isinstance(llava.embedding, Patches) and llava.flows[0].tokens == (336 // 14) ** 2 + 1
    bridge, table = llava.block(24).before
    assert isinstance(bridge, Bridge) and bridge.widths == (4096, 4096) and isinstance(table, Embedding)
    assert llava.flows[1].inserts == 576 and llava.vocab == 32064
    clip = load("clip-vit-large-patch14")
    assert [flow.causal for flow in clip.flows] == [False, True] and clip.hidden == 768
    assert isinstance(from_config(changed("bert-base", architectures=["BertModel"])).head, Features)


def test_what_the_kinds_read_is_understood():
    families = {load(name).family for name in catalog.names("models")}
    assert {
        "bert",
        "vit",
        "clip",
        "t5",
        "bart",
        "llava",
        "mamba",
        "mamba2",
        "jamba",
        "zamba2",
        "nemotron_h",
    } <= families
    for name in catalog.names("models"):
        if not load(name).is_decoder:
            assert load(name).unknown_fields == (), name


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("nemotron-h-56b", {"hybrid_override_pattern": "M-R", "num_hidden_layers": 3}, "not modelled: 'R'"),
        ("nemotron-3-ultra-550b-a55b", {"layers_block_type": ["mamba", {}]}, "not modelled: '{}'"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 39 + [{}]}, "not modelled: '{}'"),
        ("nemotron-h-56b", {"num_hidden_layers": 7}, "num_hidden_layers=7 and the pattern has 118 layers"),
        ("nemotron-3-super-120b-a12b", {"moe_latent_size": -1}, "moe_latent_size"),
        ("bamba-9b", {"attn_layer_indices": [9, 32]}, "a layer beyond num_hidden_layers=32"),
        ("bamba-9b", {"mamba_d_head": 63}, "mamba_d_head=63 * mamba_n_heads=128 is not mamba_expand * hidden_size"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 39 + ["rwkv"]}, "not modelled: 'rwkv'"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"]}, "num_hidden_layers=40 and layer_types has 1 layers"),
        ("qwen3-next-80b-a3b", {"layer_types": ["linear_attention", "rwkv"] * 24}, "not modelled: 'rwkv'"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 5}, "linear_num_key_heads=5 does not divide"),
        ("bert-base", {"architectures": ["BertForQuestionAnswering"]}, "the head of BertForQuestionAnswering"),
        ("bert-base", {"position_embedding_type": "relative_key"}, "position_embedding_type is not modelled"),
        ("vit-base-patch16", {"patch_size": 15}, "patch_size=15 does not divide image_size=224"),
        ("t5-base", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'gated-tanh' is not modelled"),
        ("t5-base", {"d_kv": None}, "d_kv is missing"),
        ("bart-large", {"normalize_before": True}, "normalize_before is not modelled"),
        (
            "llava-1.5-7b",
            {"vision_config": {"model_type": "siglip_vision_model"}},
            "'siglip_vision_model' is not modelled",
        ),
        ("zamba2-2.7b", {"hybrid_layer_ids": [6, 99]}, "a layer beyond num_hidden_layers=54"),
        ("zamba2-2.7b", {"hybrid_layer_ids": None}, "hybrid_layer_ids is missing"),
        ("mamba2-2.7b", {"n_groups": 3}, "n_groups=3 does not divide num_heads=80"),
    ],
)
def test_what_is_wrong_or_not_modelled_is_named(name, values, said):
    found = faults(changed(name, **values))
    assert any(said in d.message for d in found), [d.message for d in found]
    assert all(d.code in ("M001", "M002", "M003", "M005") and d.place for d in found)


def test_all_layers_that_are_not_modelled_are_named_at_once(tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps(changed("bert-base", architectures=["BertForX"], position_embedding_type="x", vocab_size=-1))
    )
    asked = ["predict", str(file), "--on", "8xh100", "--train", "batch=64,seq=512", "--plan", "dp8"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "head of BertForX" in said and "position_embedding_type" in said and "vocab_size" in said


@pytest.mark.parametrize(
    ("name", "train", "said"),
    [
        ("vit-base-patch16", "batch=64,seq=512", "has 197 image tokens a sequence, not 512"),
        ("llava-1.5-7b", "batch=64,seq=512", "576 of a sequence's tokens in llava-1.5-7b are an image's"),
        ("bert-large", "batch=64,seq=1024", "learned positions for 512 tokens"),
        ("clip-vit-large-patch14", "batch=64,seq=128", "learned positions for 77 tokens"),
    ],
)
def test_sequences_that_a_model_does_not_have_are_refused(name, train, said, capsys):
    assert main(["predict", name, "--on", "8xh100", "--train", train, "--plan", "dp8"]) == 2
    assert said in capsys.readouterr().err
    assert parse(train)
