"""Images that an ensemble of experts makes on real ranks, as by hand in float64, in the bytes that are predicted; and
the mean of experts' predictions as that of the mixture, where both are known in closed form."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.answer.denoising import predict_denoising
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.image_making import unexecutable_images
from meshwright.run import noise
from meshwright.run.ensemble import mixed, weighed
from meshwright.run.images import GUIDANCE, ImagesJob, make
from meshwright.run.weights import open_weights, save_weights
from meshwright.run.world import World
from meshwright.spec.denoise import Denoise
from meshwright.spec.denoise import parse as parse_denoise
from tests.run.denoisers import IMAGES, TRAIN, begun, by_hand, model
from tests.run.processes import launch_kept
from tests.run.test_ddm import ROUTER, router_by_hand

#: Largest difference, relative to the largest number. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9
EXPERTS, STEPS, IMAGES_MADE = 4, 6, 3


@cache
def folder(number):
    """Weights of an expert, or of the router (-1), whose modulation is not zero, beside their configuration."""
    config = ROUTER | {"num_labels": EXPERTS} if number < 0 else IMAGES
    trainer = begun(model(config), "dp1 mb4", TRAIN, seed=number + 1)
    for piece in trainer.pieces():
        piece.values.mul_(20 if number < 0 else 6)
    where = Path(mkdtemp()) / "weights"
    return str(save_weights(where, trainer.pieces(), trainer.model, trainer.mesh["world"], config=config))


def asked(**over):
    said = {"images": IMAGES_MADE, "size": 64, "steps": STEPS, "dtype": "fp32", "experts": EXPERTS}
    return Denoise(**(said | {"router": folder(-1)} | over))


def on_rank(rank, plan, said, weights):
    world = World(rank, plan.num_ranks, rank, plan.num_ranks, "here", torch.device("cpu"))
    return make(world, ImagesJob(model=model(), plan=plan, denoise=said, weights=weights, dtype="float64"))


def made(text, **over):
    """The images that are made, and their prediction."""
    plan, said = parse(text), asked(**over)
    ranks = plan.layout.num_ranks
    found = predict_denoising(model(), mw.load_cluster(f"{ranks}xh100"), said, plan)
    assert not unexecutable_images(found.plan, model(), said)
    weights = ",".join(map(folder, range(EXPERTS)))
    return launch_kept(ranks, on_rank, found.plan, said, weights)[0], found


def tensors(number):
    there = open_weights(Path(folder(number)))
    return {name: one.values().view(tuple(one.block.shape)) for name, one in there.items()}


def hand_made(active, guidance=True):
    """Images behind every step, by hand, and how many experts each image had: DDIM of the mean of experts' noise."""
    every, router = [tensors(number) for number in range(EXPERTS)], tensors(-1)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    x = noise.drawn((IMAGES_MADE, 3, 8, 8), torch.arange(IMAGES_MADE), 0, 0, IMAGES_MADE).noise.double()
    steps, out, chosen = [166 * n for n in reversed(range(STEPS))], [], []
    none = torch.full((IMAGES_MADE,), 5)
    for number, step in enumerate(steps):
        at = torch.full((IMAGES_MADE,), step)
        share = torch.softmax(router_by_hand(router, x, at), 1)
        for row in share:
            row[torch.argsort(row)[: EXPERTS - active]] = 0.0
        share = share / share.sum(1, keepdim=True)
        chosen.append(share)
        noised = torch.zeros_like(x)
        for expert, weights in enumerate(every):
            told = by_hand(weights, IMAGES, x, at, torch.arange(IMAGES_MADE))[:, :3]
            if guidance:
                untold = by_hand(weights, IMAGES, x, at, none)[:, :3]
                told = untold + GUIDANCE * (told - untold)
            noised += share[:, expert].view(-1, 1, 1, 1) * told
        now, then = kept[step], kept[steps[number + 1]] if number < STEPS - 1 else torch.ones(())
        x = then.sqrt() * (x - (1 - now).sqrt() * noised) / now.sqrt() + (1 - then).sqrt() * noised
        out.append(x)
    return out, torch.stack(chosen)


def close(one, other):
    one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
    assert one.shape == other.shape and float((one - other).abs().max()) < TOLERANCE * float(other.abs().max())


@pytest.mark.parametrize("active", [0, 1, 2])
@pytest.mark.parametrize("text", ["dp1", "dp2", "dp4"])
def test_experts_on_any_ranks_make_the_images_of_the_formulas_by_hand(text, active):
    found, prediction = made(text, active=active)
    expected, shares = hand_made(active or EXPERTS)
    close(found["images"], expected[-1])
    assert len({*shares.argmax(-1).flatten().tolist()}) > 1  # images are of different experts
    # of eight bytes a number, and predicted of four
    assert found["sent_bytes"] == 2 * prediction.times.mixed_bytes == (0 if text == "dp1" else 8 * 3 * 3 * 8 * 8)
    if not active:
        assert "apart" not in found
        return
    whole, _ = hand_made(EXPERTS)
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(expected, whole)]
    assert found["apart"] == pytest.approx(apart, rel=1e-6) and apart[-1] > 1e-6


def test_images_without_guidance_pass_their_experts_once():
    close(made("dp2", guidance=False, active=1)[0]["images"], hand_made(1, guidance=False)[0][-1])


def mixture(step):
    """Of a mixture of three Gaussian clusters in the plane, noised as in a step: noisy points, the noise that is
    expected of each, that of each cluster by itself, and the logits of the clusters, in closed form (float64)."""
    kept = float(noise.kept()[step])
    middles = torch.tensor([[-2.0, 1.0], [1.5, 0.5], [0.0, -3.0]], dtype=torch.float64)
    spread, prior = (
        torch.tensor([0.4, 0.7, 0.2], dtype=torch.float64),
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    )
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64).mul_(2).requires_grad_()
    variance = kept * spread**2 + 1 - kept
    away = x[:, None] - kept**0.5 * middles
    logits = prior.log() - away.square().sum(-1) / (2 * variance) - variance.log()
    # the noise that is expected is the score times minus its deviation (Vincent 2011)
    marginal = -((1 - kept) ** 0.5) * torch.autograd.grad(torch.logsumexp(logits, 1).sum(), x)[0]
    each = (1 - kept) ** 0.5 * away / variance[:, None]
    return x.detach(), marginal, each.detach(), logits.detach()


@pytest.mark.parametrize("step", [0, 100, 400, 999])
def test_the_mean_of_experts_weighed_by_the_clusters_probability_is_that_of_the_mixture(step):
    x, marginal, each, logits = mixture(step)
    experts = {number: lambda mine, number=number: each[mine, number] for number in range(3)}
    assert torch.allclose(mixed(x, weighed(logits, 3), experts), marginal, rtol=1e-12, atol=1e-12)
    if step < 999:  # behind which it is noise alone, and clusters do not differ
        even = mixed(x, torch.full((200, 3), 1 / 3, dtype=torch.float64), experts)
        assert float((even - marginal).abs().max()) > 0.1


def predicted(text, **over):
    of = mw.load_model("dit-xl-2-256")
    said = Denoise(**({"images": 1, "size": 256, "steps": 50} | over))
    plan = parse(text)
    return predict_denoising(of, mw.load_cluster(f"{plan.layout.num_ranks}xh100"), said, plan)


def test_the_top_expert_costs_the_compute_of_one_and_all_of_them_that_of_all(tmp_path):
    one, top, every = predicted("dp1"), predicted("dp1", experts=8, active=1), predicted("dp1", experts=8)
    assert top.times.computed_s == one.times.computed_s and every.times.computed_s == pytest.approx(
        8 * one.times.computed_s
    )
    assert top.latency.value == one.latency.value
    held = top.memory[0].peak_bytes - one.memory[0].peak_bytes
    assert held == pytest.approx(7 * one.model.num_params * 2, rel=1e-3)  # seven more models of 16 bits
    spread, shared = predicted("dp8", experts=8), predicted("dp8", images=8)  # one that has as many rows a rank
    assert spread.times.computed_s == shared.times.computed_s and spread.latency.value < every.latency.value / 4
    small = {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64, "in_channels": 4, "patch_size": 2}
    small |= {"architectures": ["DiTTransformer2DModel"], "sample_size": 32, "num_labels": 8}
    (tmp_path / "router.json").write_text(json.dumps(small))
    weighed_too = predicted("dp1", experts=8, active=1, router=str(tmp_path / "router.json"))
    assert 1.01 * one.times.computed_s < weighed_too.times.computed_s < 1.5 * one.times.computed_s


def test_images_of_one_rank_go_evenly_to_the_experts_that_are_active():
    assert Denoise(size=64, images=8, experts=8, active=1).passes(1) == (8, 1)
    assert Denoise(size=64, images=1, experts=8, active=2).passes(1) == (2, 1)
    assert Denoise(size=64, images=16, experts=8, active=1).passes(4) == (2, 2)
    assert Denoise(size=64, images=16, experts=8).passes(4) == (2, 16)


@pytest.mark.parametrize(
    ("text", "over", "help"),
    [
        ("dp1 tp2", {}, "drop tp"),
        ("dp1 pp2 stale=stages", {}, "drop pp"),
        ("dp3", {}, "say dp2"),
        ("dp1", {"router": "dit-xl-2-256"}, "num_labels 4"),
        ("dp1", {"experts": 3}, "num_labels 3"),
    ],
)
def test_plans_and_routers_that_are_of_no_ensemble_are_refused(text, over, help):
    with pytest.raises(MeshwrightError) as refused:
        made(text, **over)
    assert any(help in one.help for one in refused.value.diagnostics), refused.value


def test_experts_without_a_router_are_predicted_and_not_run():
    said = msgspec.structs.replace(asked(), router="")
    assert any("num_labels" in one.help for one in unexecutable_images(parse("dp1"), model(), said))
    found = predict_denoising(model(), mw.load_cluster("1xh100"), said, parse("dp1"))
    assert any(one.name == "router" and one.value == "no time" for one in found.assumptions)
    with pytest.raises(MeshwrightError, match="tells the class of noisy images"):
        predict_denoising(model(ROUTER), mw.load_cluster("1xh100"), Denoise(size=64), parse("dp1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size=64,active=1", "of one model"),
        ("size=64,experts=2,active=3", "of 2 experts"),
        ("size=64,experts=0", "W002"),
    ],
)
def test_words_of_ensembles_that_cannot_be_are_refused(text, said):
    with pytest.raises(MeshwrightError, match=said):
        parse_denoise(text)


def test_words_of_an_ensemble_round_trip():
    said = Denoise(size=64, experts=4, active=1, router="r.json")
    assert parse_denoise(said.text()) == said
