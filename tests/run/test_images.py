"""Images that real ranks make: exact plans as one process, approximate ones as their papers say by hand, in bytes that
are predicted."""

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.answer.denoising import predict_denoising
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.image_making import unexecutable_images
from meshwright.run import noise
from meshwright.run.images import GUIDANCE, ImagesJob, make
from meshwright.run.weights import open_weights, save_weights
from meshwright.run.world import World
from meshwright.spec.denoise import Denoise
from tests.run.denoisers import FILM, IMAGES, TRAIN, VIDEOS, begun, by_hand, model
from tests.run.processes import launch_kept

#: Largest difference, relative to the largest number. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9
ASKED = Denoise(images=2, size=64, steps=6, warmup=2, dtype="fp32")
DEEP = IMAGES | {"num_layers": 4}
CONFIGS = {"images": DEEP, "videos": VIDEOS}


@cache
def weights(family):
    """A folder with weights whose modulation is not zero, large enough that what is attended to is seen."""
    folder = Path(mkdtemp()) / "weights"
    trainer = begun(model(CONFIGS[family]), "dp1 mb4", FILM if family == "videos" else TRAIN)
    for piece in trainer.pieces():
        piece.values.mul_(6)
    return str(save_weights(folder, trainer.pieces(), trainer.model, trainer.mesh["world"]))


def on_rank(rank, config, plan, asked, folder):
    world = World(rank, plan.num_ranks, rank, plan.num_ranks, "here", torch.device("cpu"))
    return make(world, ImagesJob(model=model(config), plan=plan, denoise=asked, weights=folder, dtype="float64"))


def made(text, asked=ASKED, family="images"):
    """The images that are made, and their prediction."""
    plan, config = parse(text), CONFIGS[family]
    ranks = plan.layout.num_ranks
    found = predict_denoising(model(config), mw.load_cluster(f"{ranks}xh100"), asked, plan)
    assert not unexecutable_images(found.plan, model(config), asked)
    return launch_kept(ranks, on_rank, config, found.plan, asked, weights(family))[0], found


def close(one, other):
    one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
    assert one.shape == other.shape and float((one - other).abs().max()) < TOLERANCE * float(other.abs().max())


def hand_made(mix=None, source=lambda number: number, asked=ASKED):
    """Images behind every step by hand: DDIM with guidance, in the formulas of the papers. The noise that step `number`
    goes by is that of the images in front of step ``source(number)``; ``mix(number)`` is the attention of a step."""
    there = open_weights(Path(weights("images")))
    tensors = {name: one.values().view(tuple(one.block.shape)) for name, one in there.items()}
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    x = noise.drawn((2, 3, 8, 8), torch.arange(2), 0, 0, 2).noise.double()
    steps = [166 * n for n in reversed(range(6))]
    told, seen, out = torch.tensor([0, 1, 5, 5]), [], []
    for number, step in enumerate(steps):
        rows = torch.cat((x, x))
        attention = None if mix is None else mix(number)
        found = by_hand(tensors, DEEP, rows, torch.full((4,), step), told, attention)[:, :3]
        seen.append(found[2:] + GUIDANCE * (found[:2] - found[2:]))
        noised = seen[source(number)]
        now, then = kept[step], kept[steps[number + 1]] if number < 5 else torch.ones(())
        clean = (x - (1 - now).sqrt() * noised) / now.sqrt()
        x = then.sqrt() * clean + (1 - then).sqrt() * noised
        out.append(x)
    return out


@cache
def exact():
    return hand_made()


@pytest.mark.parametrize(
    "text",
    [
        *("dp1", "dp2", "dp4", "dp1 tp2", "dp1 tp2 nosp", "dp1 pp2", "dp1 pp4", "dp1 cp2", "dp1 cp2 allgather"),
        *("dp1 cp2 ulysses", "dp1 cp4 allgather ulysses2", "dp2 cp2 allgather", "dp1 cp2 pp2 allgather"),
        "tp2 pp2 dp1",
    ],
)
def test_every_exact_plan_makes_the_images_of_the_formulas_by_hand(text):
    found, _ = made(text)
    close(found["images"], exact()[-1])
    assert "apart" not in found


def test_images_without_guidance_are_shared_out_among_replicas():
    asked = Denoise(images=4, size=64, steps=5, guidance=False, dtype="fp32")
    close(made("dp4", asked)[0]["images"], made("dp1", asked)[0]["images"])


@pytest.mark.parametrize("text", ["dp2", "dp1 cp2 ulysses", "dp1 cp2 dsp", "dp1 pp2"])
def test_every_exact_plan_makes_the_same_videos(text):
    asked = Denoise(images=2, size=64, steps=4, frames=4, guidance=False, dtype="fp32")
    close(made(text, asked, "videos")[0]["images"], made("dp1", asked, "videos")[0]["images"])


def patched(number, cp, stale, halo, held):
    """A step's attention of `cp` patches: to keys and values of others of the step before, where they are stale, and of
    neighbours' nearest tokens alone, where there is a halo."""

    def mix(layer, q, k, v):
        shown = held.get(layer, (k, v)) if stale and number >= ASKED.warmup else (k, v)
        held[layer], each, out = (k, v), q.shape[2] // cp, []
        for rank in range(cp):
            first, end = rank * each, (rank + 1) * each
            near = round(halo * each) if halo else q.shape[2]
            before, behind = slice(max(0, first - near), first), slice(end, end + near)
            some = [
                torch.cat((old[:, :, before], new[:, :, first:end], old[:, :, behind]), 2)
                for old, new in zip(shown, (k, v))
            ]
            out.append(F.scaled_dot_product_attention(q[:, :, first:end], *some))
        return torch.cat(out, 2)

    return mix


def apart(found):
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact())]


@pytest.mark.parametrize(
    ("text", "cp", "stale", "halo"),
    [
        ("dp1 cp2 allgather stale=patches", 2, True, 0.0),
        ("dp1 cp4 allgather stale=patches", 4, True, 0.0),
        ("dp2 cp2 allgather stale=patches", 2, True, 0.0),
        ("dp1 tp2 cp2 allgather stale=patches", 2, True, 0.0),
        ("dp1 cp4 allgather stale=patches halo=0.5", 4, True, 0.5),
        ("dp1 cp4 allgather halo=0.25", 4, False, 0.25),
    ],
)
def test_patches_of_the_step_before_are_attended_to_in_the_bytes_that_are_predicted(text, cp, stale, halo):
    found, prediction = made(text)
    expected = hand_made(partial(patched, cp=cp, stale=stale, halo=halo, held={}))
    close(found["images"], expected[-1])
    assert found["apart"] == pytest.approx(apart(expected), rel=1e-6, abs=1e-12)
    assert found["apart"][-1] > 1e-6
    assert found["sent_bytes"] == 2 * prediction.times.sent_bytes  # of eight bytes a number, and predicted of four


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_go_on_from_what_the_one_before_has_left_in_the_step_before(stages):
    found, _ = made(f"dp1 pp{stages} stale=stages")
    last = ASKED.warmup - 1
    expected = hand_made(source=lambda n: n if n <= last else max(last, n - stages + 1))
    close(found["images"], expected[-1])
    assert found["apart"] == pytest.approx(apart(expected), rel=1e-6, abs=1e-12)
    assert found["apart"][:2] == pytest.approx([0, 0], abs=1e-9) and found["apart"][-1] > 1e-6


REFUSED = {
    "a U-Net": ("sdxl", "dp1", Denoise(size=1024), "feature maps have no modules"),
    "more steps than the noise has": (IMAGES, "dp1", Denoise(size=64, steps=2000), "the noise has 1,000"),
    "guidance without classes": (VIDEOS, "dp1", Denoise(size=64, frames=4), "knows none"),
    "stale patches of videos": (
        VIDEOS,
        "cp2 allgather stale=patches",
        Denoise(size=64, frames=4, guidance=False),
        "ranks share frames",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_images_is_refused(case):
    config, text, asked, said = REFUSED[case]
    of = mw.load_model(config) if isinstance(config, str) else model(config)
    plan = parse(text)
    found = unexecutable_images(plan.on(plan.layout.num_ranks if "dp" in text else 2), of, asked)
    assert any(said in one.message for one in found)


def test_the_command_writes_images_as_data_are_read(tmp_path, capsys):
    import json

    (tmp_path / "small.json").write_text(json.dumps(DEEP))
    words = ["run", str(tmp_path / "small.json"), "--on", "1xh100", "--denoise", "images=3,size=64,steps=4"]
    words += ["--device", "cpu", "--plan", "dp1", "--dtype", "fp32", "--weights", weights("images")]
    assert main([*words, "--json", "--out", str(tmp_path / "made.npz")]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0
    with np.load(tmp_path / "made.npz") as file:
        found = dict(file)
    assert found["images"].shape == (3, 3, 8, 8) and found["labels"].tolist() == [0, 1, 2]
    with pytest.raises(MeshwrightError) as error:
        from meshwright.cli.run import run

        run([*words[1:], "--steps", "3", "--out", str(tmp_path / "made.npz")])
    assert {one.code for one in error.value.diagnostics} == {"X004", "X104"}
