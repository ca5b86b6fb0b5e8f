"""Small diffusion transformers for real training, the formulas of DiT's authors by hand, and what processes have of a
job on them."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from meshwright.plan import parse
from meshwright.run import denoiser
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.classifiers import state, steps_of

IMAGES = {
    "architectures": ["DiTTransformer2DModel"],
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 3,
    "out_channels": 6,
    "patch_size": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 5,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_zero",
}
VIDEOS = IMAGES | {
    "architectures": ["LatteTransformer3DModel"],
    "num_layers": 2,
    "video_length": 4,
    "num_embeds_ada_norm": 0,
    "out_channels": 3,
}
TRAIN = Train(global_batch=4, seq_len=16, optimizer="momentum", dtype="fp32")
FILM = Train(global_batch=4, seq_len=64, frames=4, optimizer="momentum", dtype="fp32")


def model(config=None, **over):
    return from_config((IMAGES if config is None else config) | over, name="small")


def samples(step: int, dp: int = 1, index: int = 0, train: Train = TRAIN) -> Batch:
    """This rank's part of a global batch of samples that depends on the step alone."""
    draw = torch.Generator().manual_seed(1000 + step)
    sizes = ((train.frames,) if train.frames else ()) + (3, 8, 8)
    inputs = torch.randn(train.global_batch, *sizes, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 5, (train.global_batch,), generator=draw)
    count = train.global_batch // dp
    mine = slice(index * count, (index + 1) * count)
    return Batch(inputs[mine], None, labels[mine])


def begun(of, text: str, train: Train = TRAIN, **settings) -> Trainer:
    """A trainer in float64 under a plan, whose modulation does not begin at zero, so that all that it modulates has a
    gradient from the first step on."""
    plan = parse(text)
    plan = plan.on(plan.layout.num_ranks)
    known = Settings(**({"precision": "float64", "lr": 0.05, "clip": 0.0, "weight_decay": 0.0} | settings))
    before, denoiser.AT_FIRST = denoiser.AT_FIRST, "normal"
    try:
        return Trainer(of, plan, train, build(plan), settings=known)
    finally:
        denoiser.AT_FIRST = before


def trained(rank: int, config: dict, train: Train, text: str, count: int) -> tuple:
    """Losses of a job's steps, and what this rank holds of its state behind them."""
    trainer = begun(model(config), text, train)
    return steps_of(trainer, samples, 0, count), state(trainer)


def wave(numbers, width, *, cosines_first):
    """Equation of Vaswani et al. (1706.03762, 3.5) for numbers [n], [n, width]."""
    every = [[n / 10000 ** (2 * i / width) for i in range(width // 2)] for n in numbers.tolist()]
    angles = torch.tensor(every, dtype=torch.float64)
    both = (torch.cos(angles), torch.sin(angles))
    return torch.cat(both if cosines_first else both[::-1], 1)


def by_hand(weights, config, noisy, steps, classes, mix=None):
    """The output [b, out_channels, 8, 8] of the formulas in facebookresearch/DiT's models.py, of published weights;
    `mix` stands in for a layer's attention, of its number, q, k and v [b, heads, s, d]."""
    mix = mix or (lambda layer, *parts: F.scaled_dot_product_attention(*parts))
    w, h, heads = weights, config["num_attention_heads"] * config["attention_head_dim"], config["num_attention_heads"]
    x = F.conv2d(noisy, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=2).flatten(2).transpose(1, 2)
    side = math.isqrt(x.shape[1])
    at = [(r, c) for r in range(side) for c in range(side)]
    table = [wave(torch.tensor([p[i] for p in at]), h // 2, cosines_first=False) for i in (1, 0)]
    x = x + torch.cat(table, 1)

    def linear(name, y):
        return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", wave(steps, 256, cosines_first=True))))
    if config["num_embeds_ada_norm"]:
        c = c + w["y_embedder.embedding_table.weight"][classes]

    def modulated(y, shift, scale):
        return F.layer_norm(y, (h,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    for i in range(config["num_layers"]):
        six = linear(f"blocks.{i}.adaLN_modulation.1", F.silu(c)).chunk(6, 1)
        q, k, v = linear(f"blocks.{i}.attn.qkv", modulated(x, six[0], six[1])).unflatten(-1, (3, heads, -1)).unbind(2)
        mixed = mix(i, *(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2).flatten(2)
        x = x + six[2][:, None] * linear(f"blocks.{i}.attn.proj", mixed)
        inner = F.gelu(linear(f"blocks.{i}.mlp.fc1", modulated(x, six[3], six[4])), approximate="tanh")
        x = x + six[5][:, None] * linear(f"blocks.{i}.mlp.fc2", inner)
    two = linear("final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, 1)
    x = linear("final_layer.linear", modulated(x, *two))
    x = x.unflatten(1, (side, side)).unflatten(-1, (2, 2, config["out_channels"]))
    return torch.einsum("nhwpqc->nchpwq", x).flatten(4, 5).flatten(2, 3)
