"""Diffusion transformers: parameters and operations of the paper's table, and what is not modelled refused."""

import json

import msgspec
import pytest

import meshwright as mw
from meshwright import layers
from meshwright.errors import MeshwrightError
from meshwright.layers.kind import Tokens
from meshwright.spec.items import document
from meshwright.spec.model import config, from_config, published


def forward_macs(model, tokens):
    """Multiplications of the forward of one image."""
    one = Tokens(model=model, batch=((document(tokens), 1),), rows=1, masked=False)
    found = [(n, layers.of(layer).flops(layer, one)) for n, layer in model.all_layers]
    return sum(n * (f.weights + f.mixing) for n, f in found) / 2


@pytest.mark.parametrize(
    ("name", "tokens", "gigaflops"), [("dit-xl-2-256", 256, 118.64), ("dit-xl-2-512", 1024, 524.6)]
)
def test_operations_are_those_of_the_paper_which_counts_a_multiplication_and_its_addition_once(name, tokens, gigaflops):
    # Peebles and Xie 2023, 2212.09748, tables 4 and 6 (from memory, not read): 118.64 and 524.6 Gflops
    assert forward_macs(mw.load_model(name), tokens) / 1e9 == pytest.approx(gigaflops, rel=2e-3)


def test_a_published_configuration_says_what_it_is_of(tmp_path):
    """Weights go with the configuration that they were trained by, and are read with it."""
    said = {key: value for key, value in config("dit-xl-2-256").items() if key != "architectures"}
    said |= {"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.30"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = config(tmp_path)
    assert found == published(said) and found["_class_name"] and "_diffusers_version" not in found
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert mw.load_model(tmp_path).num_params == mw.load_model("dit-xl-2-256").num_params


def test_parameters_are_those_of_the_modules_that_the_paper_describes():
    h, layer_count, side = 48, 2, 8
    small = config("dit-xl-2-256") | {
        "num_layers": layer_count, "num_attention_heads": 4, "attention_head_dim": 12, "sample_size": side,
        "num_embeds_ada_norm": 10,
    }  # fmt: skip
    # weights and biases: queries, keys and values, output, MLP up and down, the block's six vectors
    block = (h + 1) * 3 * h + (h + 1) * h + (h + 1) * 4 * h + (4 * h + 1) * h + (h + 1) * 6 * h
    # patches of 2 x 2 x 4, the step from 256 numbers, ten classes and none; two vectors, and patches of 2 x 2 x 8
    ends = (16 + 1) * h + (256 + 1) * h + (h + 1) * h + 11 * h + (h + 1) * 2 * h + (h + 1) * 32
    positions = (side // 2) ** 2 * h  # a table that is not learned, and in the checkpoint
    assert from_config(small).num_params == layer_count * block + ends + positions


def test_a_published_checkpoint_has_as_many_numbers():
    assert mw.load_model("dit-xl/2").num_params == 675_129_632  # what the authors' script prints (from memory)


def test_a_step_is_predicted_at_any_size_of_images_and_attends_both_ways():
    model, cluster = mw.load_model("dit-xl-2"), mw.load_cluster("8xa100-80")
    plan = mw.parse_plan("dp8 mb4")
    small, large = (
        mw.predict(model, cluster, mw.parse_train(f"batch=32,seq={n}"), plan, detail=False) for n in (256, 1024)
    )
    assert small.fits and large.fits and 2.5 < large.attribution["gemm"] / small.attribution["gemm"] < 4
    [attention] = model.attentions
    masked = msgspec.structs.replace(model, streams=())
    found = mw.predict(masked, cluster, mw.parse_train("batch=32,seq=1024"), plan, detail=False)
    assert found.attribution["attention"] < large.attribution["attention"] and not attention.rotary


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm_type": "ada_norm_single"}, "norm_type is not modelled"),
        ({"cross_attention_dim": 1152}, "cross_attention_dim is not modelled"),
        ({"sample_size": 33}, "patch_size=2 does not divide sample_size=33"),
    ],
)
def test_other_diffusion_transformers_are_refused_by_name(changed, said):
    with pytest.raises(MeshwrightError, match=said):
        from_config(config("dit-xl-2-256") | changed)


def test_a_configuration_of_diffusers_names_its_class_by_another_key():
    said = config("dit-xl-2-256")
    (named,) = said.pop("architectures")
    assert from_config(said | {"_class_name": named}).num_params == mw.load_model("dit-xl-2").num_params
