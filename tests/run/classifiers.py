"""Small classifiers of images for real training, and what processes have of a job on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.small import plain

RESNET = {
    "architectures": ["ResNetForImageClassification"],
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [2, 1],
    "layer_type": "bottleneck",
    "num_labels": 5,
}
VGG = {
    "architectures": ["VGG"],
    "model_type": "vgg",
    "features": [4, "M", 6, 6, "M"],
    "batch_norm": True,
    "pooled_side": 2,
    "classifier_widths": [8, 7],
    "num_labels": 5,
}
#: Classifiers of features: with a layer between, with none, and of values.
PERCEPTRON = {"architectures": ["FeatureClassifier"], "num_features": 12, "hidden_sizes": [9, 7], "num_labels": 5}
SOFTMAX = PERCEPTRON | {"hidden_sizes": []}
VALUES = SOFTMAX | {"num_labels": 1, "loss": "square"}
SIDE = 16
FEATURES = Train(global_batch=8, seq_len=1, features=12, optimizer="momentum", dtype="fp32")
TRAIN = Train(global_batch=8, seq_len=SIDE**2, image=SIDE, optimizer="momentum", dtype="fp32")


def model(config=None, **over):
    return from_config((RESNET if config is None else config) | over, name="small")


def images(step: int, dp: int = 1, index: int = 0, train: Train = TRAIN) -> Batch:
    """This rank's part of a global batch of images, or features, that depends on the step alone."""
    rng = np.random.default_rng(1000 + step)
    sizes = (3, train.image, train.image) if train.image else (train.features,)
    inputs = torch.from_numpy(rng.normal(size=(train.global_batch, *sizes)))
    labels = torch.from_numpy(rng.integers(0, 5, train.global_batch))
    count = train.global_batch // dp
    mine = slice(index * count, (index + 1) * count)
    return Batch(inputs[mine], None, labels[mine])


def begun(of, text: str, train: Train = TRAIN, **settings) -> Trainer:
    """A trainer in float64 under a plan, on this rank of as many as the plan has."""
    plan = parse(text)
    plan = plan.on(plan.layout.num_ranks)
    known = Settings(**({"precision": "float64", "lr": 0.05, "clip": 0.0} | settings))
    return Trainer(of, plan, train, build(plan), settings=known)


def steps(trainer: Trainer, first: int, last: int) -> list[float]:
    """Losses of steps [first, last)."""
    return steps_of(trainer, images, first, last)


def steps_of(trainer: Trainer, batch: Callable[..., Batch], first: int, last: int) -> list[float]:
    """Losses of steps [first, last) on batches that a function makes."""
    dp, found = trainer.mesh["dp"], []
    for step in range(first, last):
        found.append(trainer.step(batch(step, dp.size, dp.index, trainer.train)).loss)
    trainer.settle()
    trainer.statistics.join(trainer.joined)
    return found


def state(trainer: Trainer) -> list[tuple]:
    """Parameters, moments apart, and running statistics that this rank holds, as plain values."""
    return [
        (plain(p.parameter), p.start, p.stop, p.values.detach().clone().double())
        for p in trainer.pieces()
        if p.key == "param"
    ]


def trained(rank: int, config: dict, train: Train, text: str, count: int) -> tuple:
    """Losses of a job's steps, and what this rank holds of its state behind them."""
    trainer = begun(model(config), text, train)
    return steps(trainer, 0, count), state(trainer)
