"""Small diffusion transformers behind a frozen encoder of images, and jobs that train them."""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.plan import parse
from meshwright.run import denoiser
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.classifiers import state

ENCODED = {
    "architectures": ["DiTPipeline"],
    "vae": {
        "block_out_channels": [4, 4, 8, 8],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "in_channels": 3,
    },
    "transformer": {
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 4,
        "num_embeds_ada_norm": 5,
    },
}
TRAIN = Train(global_batch=8, seq_len=32**2, image=32, optimizer="momentum", dtype="fp32")


def model():
    return from_config(ENCODED, name="small")


def images(step: int, dp: int = 1, index: int = 0) -> Batch:
    """This rank's part of a global batch of images that depends on the step alone."""
    draw = torch.Generator().manual_seed(2000 + step)
    inputs = torch.randn(TRAIN.global_batch, 3, 32, 32, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 5, (TRAIN.global_batch,), generator=draw)
    count = TRAIN.global_batch // dp
    mine = slice(index * count, (index + 1) * count)
    return Batch(inputs[mine], None, labels[mine])


def begun(text: str, *, predicted: bool = True) -> Trainer:
    """A trainer in float64 under a plan, in the order that its prediction found, with modulations that do not begin at
    zero."""
    plan = parse(text)
    plan = plan.on(plan.layout.num_ranks)
    order = None
    if predicted:
        cluster = mw.load_cluster(f"{plan.layout.num_ranks}xa100-80")
        order = mw.predict(model(), cluster, TRAIN, plan, detail=False).filled.order
    known = Settings(precision="float64", lr=0.05, clip=0.0, weight_decay=0.0)
    before, denoiser.AT_FIRST = denoiser.AT_FIRST, "normal"
    try:
        return Trainer(model(), plan, TRAIN, build(plan), settings=known, frozen_order=order)
    finally:
        denoiser.AT_FIRST = before


def trained(rank: int, text: str, count: int, predicted: bool) -> tuple:
    """Losses of a job's steps, what this rank holds of its state behind them, and the passes of frozen layers that it
    ran before its schedule's last action of each step."""
    trainer = begun(text, predicted=predicted)
    dp, losses, inside, last = trainer.mesh["dp"], [], 0, len(trainer.pipeline.program) - 1
    encoder, plain = trainer.encoder, trainer.encoder._pass

    def counted(one):
        nonlocal inside
        inside += one.actions <= last
        plain(one)

    for step in range(count):
        batch, following = (images(number, dp.size, dp.index) for number in (step, step + 1))
        looks = trainer.looks_ahead and step + 1 < count
        losses.append(trainer.step(batch, following if looks else None).loss)
        encoder._pass = counted
    return losses, state(trainer), inside
