"""Runs of diffusion transformers behind a frozen encoder: its weights, in and out, and through checkpoints."""

from __future__ import annotations

import json
import socket
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data, loop
from meshwright.run.checkpoint.dcp import export_distributed, into_checkpoint
from meshwright.run.checkpoint.format import Meta, find, identity
from meshwright.run.checkpoint.loading import CheckpointReader
from meshwright.run.data import samples, tokenizer
from meshwright.run.job import Job
from meshwright.run.published import frozen_tensors, published_tensors
from meshwright.run.settings import Settings
from meshwright.run.weights import export_weights, load_weights
from meshwright.run.world import World
from meshwright.spec.encoded import COMPONENT
from tests.run.encoders import TRAIN, begun, model
from tests.run.processes import launch_kept

#: Largest relative difference of losses. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9


def through_a_checkpoint(rank: int, asked: Job, ranks: int) -> None:
    loop.train(World(rank, ranks, rank, ranks, socket.gethostname(), torch.device("cpu")), asked)


def test_a_run_goes_on_with_the_encoder_that_it_began_with_under_another_plan(tmp_path):
    """Weights of an encoder that no seed makes are in the checkpoint, which is whole as published weights again, and as
    torch's distributed checkpoint."""
    draw, rng = torch.Generator().manual_seed(7), np.random.default_rng(3)
    shapes = published_tensors(model())
    weights = {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    (tmp_path / "weights").mkdir()
    save_file(weights, tmp_path / "weights" / "model.safetensors")
    np.savez(tmp_path / "some.npz", images=rng.normal(size=(16, 3, 32, 32)), labels=rng.integers(0, 5, 16))
    built = str(data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache"))

    def run(plan: str, steps: int, out: str, **said) -> list[float]:
        placed = parse(plan)
        ranks = placed.layout.num_ranks
        asked = Job(
            model=model(),
            plan=placed.on(ranks),
            train=msgspec.structs.replace(TRAIN, optimizer="adamw"),
            settings=Settings(precision="float64", lr=0.01),
            text="some",
            corpus=built,
            steps=steps,
            quiet=True,
            out=str(tmp_path / out),
            **said,
        )
        launch_kept(ranks, through_a_checkpoint, asked, ranks)
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    whole = run("dp1 mb8", 4, "whole", weights=str(tmp_path / "weights"))
    run("dp1 pp2 mb2 filling=parts", 2, "halves", weights=str(tmp_path / "weights"))
    found = run("dp2 mb4", 4, "halves", resume=True)
    assert found == pytest.approx(whole, rel=TOLERANCE)
    saved = find(tmp_path / "halves")
    again = load_file(export_weights(saved, tmp_path / "again") / "model.safetensors")
    assert again.keys() == weights.keys()
    own = [name for name in weights if name.startswith(COMPONENT)]
    assert len(own) == 74 and all(torch.equal(again[name].float(), weights[name]) for name in own)
    far = export_distributed(CheckpointReader(saved), tmp_path / "torch")
    meta = partial(Meta, seed=0, model="small", model_hash=identity(model()), plan="", world=1)
    made = into_checkpoint(far, tmp_path / "back", shapes, lambda step: meta(step=step), frozen_tensors(model()))
    back = load_file(export_weights(made, tmp_path / "third") / "model.safetensors")
    assert back.keys() == again.keys() and all(torch.equal(back[name], again[name]) for name in again)


def test_weights_of_the_transformer_alone_say_what_is_to_be_added(tmp_path):
    alone = {name: torch.zeros(shape) for name, shape in published_tensors(model()).items()}
    save_file(
        {name: one for name, one in alone.items() if not name.startswith(COMPONENT)}, tmp_path / "model.safetensors"
    )
    trainer = begun("dp1 mb8", predicted=False)
    with pytest.raises(MeshwrightError) as caught:
        load_weights(tmp_path, [*trainer.pieces(), *trainer.encoder.pieces()], model(), trainer.mesh["world"])
    (found,) = caught.value.diagnostics
    assert found.code == "H007" and "74 tensors are missing" in found.message
    assert "encoder.* and quant_conv.*" in found.help


def test_samples_of_other_channels_are_refused_by_the_encoder_that_reads_them(tmp_path):
    np.savez(tmp_path / "grey.npz", images=np.zeros((16, 1, 32, 32)), labels=np.arange(16) % 5)
    built = data.build(str(tmp_path / "grey.npz"), tokenizer.Bytes(), tmp_path / "cache")
    with pytest.raises(MeshwrightError) as caught:
        samples.load(built, TRAIN, model(), seed=0, place="--data")
    assert "in_channels of its vae" in caught.value.diagnostics[0].help
