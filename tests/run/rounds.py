"""Rounds with outer steps by hand, in one process, for tests."""

from __future__ import annotations

import msgspec
import torch

from meshwright.plan import parse
from meshwright.run.checkpoint import AsyncSaver, Meta, identity, load
from meshwright.run.mesh import alone
from meshwright.run.resume import wanted_of
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import local, small

#: Layers of the small models.
LAYERS = 4


def layer_of(name: str) -> int:
    """The layer that a parameter is exchanged with: embeddings with the first, the head with the last."""
    words = name.split(".")
    if "layers" in words:
        return int(words[words.index("layers") + 1])
    return 0 if "embed" in name else LAYERS - 1


def by_hand(
    rank: int,
    model,
    train: Train,
    last: int,
    *,
    replicas: int,
    h: int,
    rate: float,
    momentum: float,
    parts: int = 1,
    strided: bool = True,
    delay: int = 0,
    mix: float = 0.0,
    clip: float = 1.0,
):
    """Losses and norms, and the parameters, of every replica, as Streaming DiLoCo's Algorithm 2 writes it (2501.18512):
    a part's mean change, `delay` steps after it was taken, is the gradient of a Nesterov step from the parameters that
    all had at the last exchange; a replica keeps a share `mix` of its own."""
    share = Train(
        global_batch=train.global_batch // replicas,
        seq_len=train.seq_len,
        dtype=train.dtype,
        optimizer=train.optimizer,
    )
    settings = msgspec.structs.replace(local.SETTINGS, clip=clip)
    trainers = [Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=settings) for _ in range(replicas)]
    held = [{p.parameter.name: p.values for p in t.pieces() if p.key == "param"} for t in trainers]
    common = {name: values.clone() for name, values in held[0].items()}
    speed = {name: torch.zeros_like(values) for name, values in common.items()}
    part = {n: layer_of(n) % parts if strided else layer_of(n) * parts // LAYERS for n in common}
    flying: list[tuple[int, str, torch.Tensor]] = []
    seen: list[list] = [[] for _ in trainers]
    for step in range(1, last + 1):
        for index, trainer in enumerate(trainers):
            result = trainer.step(small.batch(train, model.vocab, step - 1, replicas, index))
            seen[index].append((result.loss, result.grad_norm))
        for name in common:
            if step % h == (part[name] + 1) * h // parts % h:
                gradient = torch.stack([common[name] - mine[name] for mine in held]).mean(0)
                flying.append((step + delay, name, gradient))
        for due, name, gradient in flying:
            if due == step:
                speed[name] = momentum * speed[name] + gradient
                common[name] = common[name] - rate * (gradient + momentum * speed[name])
                for mine in held:
                    mine[name].copy_(mix * mine[name] + (1 - mix) * common[name])
        for trainer in trainers:
            trainer.publish()
    return [(a, local.state(t)) for a, t in zip(seen, trainers)]


def late_by_hand(
    rank: int,
    model,
    train: Train,
    last: int,
    *,
    replicas: int,
    h: int,
    rate: float,
    momentum: float,
    eager: bool,
    clip: float = 0.0,
    penalty: float = 1.0,
    parts: int = 1,
):
    """The parameters of every replica after rounds whose mean comes one round late: as the eager updates of 2502.12996
    (Algorithm 2), where a replica has its own part of the mean at once and parameters and momentum of its own, or
    else from parameters in common, by a momentum of changes over a `penalty`, within `clip`. Every so manieth layer is
    due together, at a step of the round of its own."""
    share = Train(global_batch=train.global_batch // replicas, seq_len=train.seq_len, dtype=train.dtype)
    trainers = [
        Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(replicas)
    ]
    held = [{p.parameter.name: p.values for p in t.pieces() if p.key == "param"} for t in trainers]
    anchors = [{name: values.clone() for name, values in mine.items()} for mine in held]
    speed = [{name: torch.zeros_like(values) for name, values in mine.items()} for mine in held]
    before = [{name: torch.zeros_like(values) for name, values in mine.items()} for mine in held]
    for step in range(1, last + 1):
        for index, trainer in enumerate(trainers):
            trainer.step(small.batch(train, model.vocab, step - 1, replicas, index))
        for name in held[0]:
            if step % h != (layer_of(name) % parts + 1) * h // parts % h:
                continue
            own = [anchor[name] - mine[name] for anchor, mine in zip(anchors, held)]
            mean = sum(one[name] for one in before) / replicas
            for index in range(replicas):
                gradient = mean + (own[index] - before[index][name]) / replicas if eager else mean / penalty
                speed[index][name] = momentum * speed[index][name] + gradient
                if clip:
                    speed[index][name].clamp_(-clip, clip)
                along = gradient + momentum * speed[index][name] if eager else speed[index][name]
                anchors[index][name] = anchors[index][name] - rate * along
                held[index][name].copy_(anchors[index][name])
            for index in range(replicas):
                before[index][name] = own[index]
        for trainer in trainers:
            trainer.publish()
    return [local.state(t) for t in trainers]


def resumed(rank: int, model, text: str, train: Train, root, half: int, then: str = ""):
    """Losses, norms and the state of steps after a save at `half`, and those of a trainer that loads it: of the same
    plan, or of one that divides the same replicas differently."""
    trainer = local.begun(model, text, train)
    local.steps(trainer, 0, half)
    saver = AsyncSaver(root, trainer.mesh["world"])
    saver.begin(
        trainer.pieces(),
        Meta(step=half, seed=0, model=model.name, model_hash=identity(model), plan=text, world=trainer.mesh.world),
    )
    saver.wait()
    on = local.steps(trainer, half, 2 * half), local.state(trainer)
    again = local.begun(model, then or text, train)
    load(root, again.pieces(), again.mesh["world"], model_hash=identity(model))
    again.set_step(half)
    return on, (local.steps(again, half, 2 * half), local.state(again))


def laid_anew(rank: int, model, text: str, train: Train, root, steps: int, then: str):
    """The values a rank held after some steps, and what one of another plan goes on with from there."""
    trainer = local.begun(model, text, train)
    local.steps(trainer, 0, steps)
    known = {"sync": trainer.plan.sync.policy, "replicas": trainer.rounds.replicas, "joined": trainer.joined}
    meta = Meta(step=steps, seed=0, model=model.name, model_hash=identity(model), plan=text, world=4, extra=known)
    saver = AsyncSaver(root, trainer.mesh["world"])
    saver.begin(trainer.pieces(), meta)
    saver.wait()
    again = local.begun(model, then, train)
    pieces, _ = wanted_of(str(root), then, again)
    load(root, pieces, again.mesh["world"], model_hash=identity(model))
    again.set_step(steps)
    return local.state(trainer), local.state(again)
