"""Diffusion transformers that are trained: against the formulas of DiT's authors by hand in float64, and under all
plans that divide their work."""

from functools import cache

import msgspec
import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run import data, noise
from meshwright.run.data import tokenizer
from tests.run.denoisers import FILM, IMAGES, TRAIN, VIDEOS, begun, by_hand, model, samples, state, trained
from tests.run.processes import launch_kept
from tests.run.small import assemble, plain

#: Largest difference, relative to a tensor's largest element. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9


def close(one, other):
    assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(other.abs().max()))


def weights_of(trainer):
    return {name: values.requires_grad_() for name, values in assemble([(state(trainer),)], 0).items()}


def expected_loss(weights, config, batch, step, rows):
    """The loss of a step by hand: noise and steps of the noise are those that are drawn for each place."""
    x, said = batch.tokens, noise.drawn(tuple(batch.tokens.shape), rows, 0, step, 4)
    share = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[said.steps].view(-1, 1, 1, 1)
    noisy = share.sqrt() * x + (1 - share).sqrt() * said.noise.double()
    classes = torch.where(said.untold, config["num_embeds_ada_norm"], batch.targets)
    found = by_hand(weights, config, noisy, said.steps, classes)
    return (found[:, : config["in_channels"]] - said.noise.double()).square().mean()


@pytest.mark.parametrize("over", [{}, {"out_channels": 3}, {"attention_bias": True, "num_layers": 3}], ids=str)
def test_a_diffusion_transformer_is_its_authors_formulas_to_the_last_gradient(over):
    config = IMAGES | over
    trainer = begun(model(config), "dp1 mb4")
    weights = weights_of(trainer)
    assert sum(w.numel() for w in weights.values()) + 16 * 32 == model(config).num_params  # and a table of 16 places
    found = []
    trainer.before_update.append(
        lambda: found.extend((plain(h.parameter), h.start, h.stop, h.gradient.clone()) for h in trainer.optimizer.held)
    )
    loss = expected_loss(weights, config, samples(0), 0, torch.arange(4))
    loss.backward()
    assert trainer.step(samples(0)).loss == pytest.approx(loss.item(), rel=TOLERANCE)
    gradients = assemble([(found,)], 0)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        close(gradient, weights[name].grad)


@cache
def alone(family, steps=3):
    losses, held = launch_kept(1, trained, *CONFIGS[family], "dp1 mb4", steps)[0]
    return losses, assemble([(held,)], 0)


CONFIGS = {"images": (IMAGES, TRAIN), "videos": (VIDEOS, FILM)}
PLANS = {
    "images": [
        *("dp2 mb2", "dp2 mb1 zero1", "dp2 mb2 zero2", "dp2 mb1 fsdp", "dp1 mb1 full", "dp1 pp2 mb2 1f1b"),
        *("dp1 pp2 mb1 gpipe full", "dp1 pp2 mb1 zb-h1", "dp1 tp2 mb2", "dp1 tp2 mb2 nosp selective"),
        *("dp1 tp2 pp2 mb2", "dp1 cp2 mb2", "dp1 cp2 allgather mb4", "dp1 cp2 ulysses mb2 full"),
        *("dp1 cp4 ulysses2 mb2", "cp2 tp2 dp2 mb1 zero1"),
    ],
    "videos": [
        *("dp2 mb2", "dp1 cp2 mb2", "dp1 cp2 ulysses mb4", "dp1 cp4 allgather mb2", "dp1 cp2 dsp mb2"),
        *("dp1 cp4 dsp mb1 full", "dp1 cp2 dsp pp2 mb2", "cp2 dsp dp2 mb1 fsdp", "dp1 cp2 tp2 dsp nosp mb2"),
        "dp1 tp2 pp2 mb2 selective",
    ],
}


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, some in PLANS.items() for text in some])
def test_every_plan_is_one_process(family, text):
    losses, expected = alone(family)
    config, train = CONFIGS[family]
    plan = parse(text)
    ranks = plan.layout.num_ranks
    assert not unexecutable(plan.on(ranks), model(config), train)
    assert not check(plan.on(ranks), model(config), mw.load_cluster(f"{ranks}xh100"), train)
    found = launch_kept(ranks, trained, config, train, text, 3)
    for mine, _ in found:
        assert mine == pytest.approx(losses, rel=TOLERANCE)
    held = assemble([(one,) for _, one in found], 0)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        close(tensor, expected[name])


REFUSED = {
    "dp1 mb4 recompute_portions=2 full": (TRAIN, IMAGES, "not cut in portions"),
    "dp1 cp2 tp2 dsp mb4": (FILM, VIDEOS, "say nosp"),
    "dp4 mb1 sync=dipaco:levels=2x2": (TRAIN, IMAGES, "heads or paths are of text"),
    "dp1 tp2 mb4": (TRAIN, IMAGES | {"num_labels": 3, "num_embeds_ada_norm": 0}, "take tp1"),
    "dp2 mb2 sync=ddm": (TRAIN, IMAGES | {"num_labels": 3, "num_embeds_ada_norm": 0}, "it is one model"),
    "dp4 mb1 sync=fedavg:h=2": (TRAIN, IMAGES, "clients of a server"),
    "dp1 mb4 compile=yes": (TRAIN, IMAGES, "compile=yes in the dit family"),
    "dp1": (msgspec.structs.replace(TRAIN, seq_len=18), IMAGES, "say seq=16"),
    "dp2": (msgspec.structs.replace(FILM, frames=0), VIDEOS, "say frames=4"),
    "dp4": (msgspec.structs.replace(TRAIN, frames=4), IMAGES, "drop frames="),
    "dp2 mb1": (msgspec.structs.replace(TRAIN, dropout=True), IMAGES, "its authors train without"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_done_with_noisy_samples_is_refused(text):
    train, config, said = REFUSED[text]
    plan = parse(text)
    found = unexecutable(plan.on(plan.layout.num_ranks), model(config), train)
    assert any(said in f"{one.message} {one.help}" for one in found), found


def opened(folder, of, train, **arrays):
    np.savez(folder / "some.npz", **arrays)
    built = data.build(str(folder / "some.npz"), tokenizer.Bytes(), folder / "cache")
    return data.load(built, train, vocab=of.vocab, model=of, seed=3)


DRAWN = np.random.default_rng(0)
PIXELS = DRAWN.integers(0, 256, (8, 8, 8, 3), np.uint8)
FRAMES = DRAWN.integers(0, 256, (8, 4, 8, 8, 3), np.uint8)


def test_images_and_videos_are_read_as_their_patches_are(tmp_path):
    labels = np.arange(8) % 5
    images = opened(tmp_path, model(), TRAIN, images=PIXELS, labels=labels).batch(0)
    assert images.tokens.shape == (4, 3, 8, 8) and float(images.tokens.abs().max()) <= 1
    films = opened(tmp_path, model(VIDEOS), FILM, images=FRAMES, labels=labels).batch(0)
    assert films.tokens.shape == (4, 4, 3, 8, 8)
    cut = noise.patches(films.tokens, 2)
    assert cut.shape == (4, 64, 3, 2, 2) and torch.equal(noise.whole(cut, 2, 4), films.tokens)
    assert torch.equal(cut[:, 17], films.tokens[:, 1, :, :2, 2:4])  # of the second frame the second place


@pytest.mark.parametrize(
    ("config", "train", "arrays", "said"),
    [
        (IMAGES, TRAIN, {"images": PIXELS, "labels": np.arange(8)}, "there is a label 7, and small knows 5 classes"),
        (IMAGES, TRAIN, {"images": PIXELS[:, :4, :4], "labels": np.zeros(8, int)}, "seq=16 of patches of 2"),
        (VIDEOS, FILM, {"images": PIXELS, "labels": np.zeros(8, int)}, "reads 4 frames of 3 channels"),
    ],
    ids=["label", "size", "frames"],
)
def test_samples_that_do_not_fit_are_one_error(config, train, arrays, said, tmp_path):
    with pytest.raises(MeshwrightError, match="D013") as error:
        opened(tmp_path, model(config), train, **arrays)
    assert said in str(error.value)


def test_held_out_samples_have_the_same_noise_in_every_step_and_steps_over_all_of_it():
    rows = torch.arange(4)
    one, other = (noise.drawn((4, 3, 8, 8), rows, seed, -1, 4) for seed in (0, 7))
    assert torch.equal(one.noise, other.noise) and one.steps.tolist() == [125, 375, 625, 875]
    assert not one.untold.any()
    many = noise.drawn((2000, 1), torch.arange(2000), 0, 5, 2000)
    assert 0.08 < float(many.untold.double().mean()) < 0.12
    assert abs(float(many.noise.mean())) < 0.1 and 450 < float(many.steps.double().mean()) < 550
