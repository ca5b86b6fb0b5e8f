"""Diffusion models with their frozen encoders: parameters as published, and what is read of what is frozen."""

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.spec.encoded import denoiser_of, image_channels, latent_work
from meshwright.spec.model import config, from_config


def params(model, first, end):
    return sum(model.block_params(kind).total + model.before_params(kind) for kind in model.pattern[first:end])


def test_parameters_are_those_of_the_published_checkpoints():
    model = mw.load_model("sd-2-1-with-encoders")
    # text_encoder and unet of stable-diffusion-2-1; the encoder's half of its vae and quant_conv
    assert params(model, 0, 23) + model.embedding_params + 2 * 1024 == 340_387_840
    assert params(model, 23, model.frozen) - 2 * 1024 == 34_163_592 + 72
    assert params(model, model.frozen, model.num_layers) + model.head_params + model.final_norm_params == 865_910_724
    assert mw.load_model("sd-2-1").num_params == 865_910_724


def test_a_controlnet_trains_its_copy_alone():
    model = mw.load_model("controlnet-1.0")
    first = next(i for i in range(model.num_layers) if model.block(i).locked)
    assert params(model, model.frozen, first) == 361_279_120  # lllyasviel/sd-controlnet-canny
    assert all(model.block(i).locked for i in range(first, model.num_layers)) and model.head.locked
    # text, latents, and every map that the way up reads: 12 of the way down and the middle's
    assert len(model.carried(model.frozen)) == 2 + 13


def test_trained_layers_read_words_and_latents_of_the_frozen_ones():
    model = mw.load_model("sd-2-1-with-encoders")
    read = [model.flows[stream] for stream in model.carried(model.frozen)]
    assert [(flow.name, flow.hidden, flow.length(512**2)) for flow in read] == [
        ("text", 1024, 77),
        ("maps of 1/8", 4, 64**2),
    ]


def test_trained_layers_of_a_dit_with_its_encoder_are_the_dit():
    whole, alone = mw.load_model("dit-xl-2-256-with-encoder"), mw.load_model("dit-xl-2-256")
    found = denoiser_of(whole)
    assert (found.embedding, found.head, found.blocks, found.pattern) == (
        alone.embedding,
        alone.head,
        alone.blocks,
        alone.pattern,
    )
    assert image_channels(whole) == 3 and denoiser_of(alone) is alone
    assert latent_work(whole, mw.parse_train("batch=8,image=256")).seq_len == 256


SD, CONTROL, DIT = (config(name) for name in ("sd-2-1-with-encoders", "controlnet-1.0", "dit-xl-2-256-with-encoder"))
WRONG = {
    "no vae": ({k: v for k, v in SD.items() if k != "vae"}, "M001", "has no vae"),
    "words": (SD | {"text_encoder": SD["text_encoder"] | {"hidden_size": 768}}, "M003", "makes 768"),
    "latents": (SD | {"vae": SD["vae"] | {"latent_channels": 16}}, "M003", "the autoencoder makes 16"),
    "levels": (SD | {"vae": SD["vae"] | {"block_out_channels": [128, 256]}}, "M003", "2 entries for 4"),
    "copy": (CONTROL | {"controlnet": CONTROL["controlnet"] | {"layers_per_block": 1}}, "M003", "not those of the"),
    "dit": (DIT | {"transformer": DIT["transformer"] | {"in_channels": 8}}, "M003", "the autoencoder makes 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_components_that_do_not_fit_are_refused(name):
    said, code, text = WRONG[name]
    with pytest.raises(MeshwrightError) as caught:
        from_config(said, name="other")
    found = caught.value.diagnostics
    assert any(one.code == code and text in one.message for one in found), found


def test_images_are_made_by_the_network_alone():
    from meshwright.answer.denoising import predict_denoising
    from meshwright.spec.denoise import parse

    with pytest.raises(MeshwrightError, match="is trained with"):
        whole, cluster = mw.load_model("sd-2-1-with-encoders"), mw.load_cluster("1xa100-80")
        predict_denoising(whole, cluster, parse("images=1,size=512,steps=20"), mw.parse_plan("dp1"))
