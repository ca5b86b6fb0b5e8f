"""Diffusion transformers trained behind a frozen encoder: the encoder by hand, and one process under every order."""

from functools import cache

import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run import noise
from meshwright.run.autoencoder import ImageEncoder, latents
from tests.run.encoders import TRAIN, images, model, trained
from tests.run.processes import launch_kept
from tests.run.small import assemble

#: Largest difference, relative to a tensor's largest element. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9


def close(one, other):
    assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(other.abs().max()))


def by_hand(weights, x):
    """The encoder of diffusers' AutoencoderKL, one residual block a level, of published weights: its moments."""
    w = {name.removeprefix("vae."): value for name, value in weights.items()}

    def conv(name, y, **how):
        return F.conv2d(y, w[f"{name}.weight"], w[f"{name}.bias"], **how)

    def norm(name, y):
        return F.group_norm(y, 2, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def resnet(name, y):
        found = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", y)), padding=1)
        found = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", found)), padding=1)
        return found + (conv(f"{name}.conv_shortcut", y) if f"{name}.conv_shortcut.weight" in w else y)

    x = conv("encoder.conv_in", x, padding=1)
    for level in range(4):
        x = resnet(f"encoder.down_blocks.{level}.resnets.0", x)
        if level < 3:
            x = conv(f"encoder.down_blocks.{level}.downsamplers.0.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = resnet("encoder.mid_block.resnets.0", x)
    name, (b, c, height, width) = "encoder.mid_block.attentions.0", x.shape
    places = norm(f"{name}.group_norm", x).view(b, c, -1).transpose(1, 2)
    q, k, v = (F.linear(places, w[f"{name}.{n}.weight"], w[f"{name}.{n}.bias"]) for n in ("to_q", "to_k", "to_v"))
    mixed = torch.softmax(q @ k.transpose(1, 2) / c**0.5, -1) @ v
    mixed = F.linear(mixed, w[f"{name}.to_out.0.weight"], w[f"{name}.to_out.0.bias"])
    x = resnet("encoder.mid_block.resnets.1", x + mixed.transpose(1, 2).view(b, c, height, width))
    x = conv("encoder.conv_out", F.silu(norm("encoder.conv_norm_out", x)), padding=1)
    return conv("quant_conv", x)


def test_the_encoder_is_its_authors_formulas():
    encoder = ImageEncoder(model(), torch.device("cpu"), torch.float64, 0)
    weights = {parameter.info.name: parameter for parameter in encoder.parameters()}
    assert sum(map(torch.numel, weights.values())) == sum(
        model().block_params(model().pattern[i]).total + model().before_params(model().pattern[i])
        for i in range(model().frozen)
    )
    assert not any(parameter.requires_grad for parameter in weights.values())
    found = x = images(0).tokens
    for layer in range(len(encoder)):
        found = encoder(layer, found)
    close(found, by_hand(weights, x))
    mean, spread = found.chunk(2, 1)
    drawn = noise.latent_noise((8, 4, 4, 4), torch.arange(8), 0, 3).double()
    close(latents(found, torch.arange(8), 0, 3), 0.18215 * (mean + torch.exp(spread / 2) * drawn))


@cache
def alone(steps=3):
    losses, held, _ = launch_kept(1, trained, "dp1 mb8", steps, False)[0]
    return losses, assemble([(held,)], 0)


PLANS = (
    *(
        "dp2 mb4",
        "dp1 pp2 mb2",
        "dp1 pp2 mb2 filling=waits",
        "dp1 pp2 mb2 filling=parts",
        "dp1 pp2 mb1 gpipe filling=parts",
    ),
    *("dp1 pp2 mb4 zb-h1 filling=parts", "dp2 pp2 mb2 zero1 filling=parts", "dp1 pp4 mb4 filling=parts"),
    *("dp1 pp2 mb2 interleaved vpp2 filling=waits", "dp1 pp4 mb2 full filling=waits", "dp2 mb2 fsdp"),
)


@pytest.mark.parametrize("text", PLANS)
def test_every_plan_is_one_process(text):
    losses, expected = alone()
    plan = parse(text)
    ranks = plan.layout.num_ranks
    assert not unexecutable(plan.on(ranks), model(), TRAIN)
    assert not check(plan.on(ranks), model(), mw.load_cluster(f"{ranks}xa100-80"), TRAIN)
    found = launch_kept(ranks, trained, text, 3, True)
    for mine, _, _ in found:
        assert mine == pytest.approx(losses, rel=TOLERANCE)
    held = assemble([(one,) for _, one, _ in found], 0)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        close(tensor, expected[name])
    if "filling=" in text:
        assert sum(inside for _, _, inside in found)  # some passes of the next step's batch are among a step's own


def test_without_a_prediction_passes_are_behind_all_and_change_nothing():
    losses, _ = alone()
    found = launch_kept(2, trained, "dp1 pp2 mb2 filling=waits", 3, False)
    assert all(mine == pytest.approx(losses, rel=TOLERANCE) and not inside for mine, _, inside in found)


REFUSED = {
    "dp1 tp2 mb8": (TRAIN, "say tp1 and cp1"),
    "dp2 mb2 sync=ddm": (TRAIN, "samples are routed by themselves"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_done_behind_an_encoder_is_refused(text):
    train, said = REFUSED[text]
    plan = parse(text)
    found = unexecutable(plan.on(plan.layout.num_ranks), model(), train)
    assert any(said in f"{one.message} {one.help}" for one in found), found
