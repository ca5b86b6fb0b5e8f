"""Replicas whose heads neighbours teach, for tests: as processes, and all of them by hand in one."""

from __future__ import annotations

import msgspec
import torch

from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.parameters import drawn
from meshwright.run.pieces import Part
from meshwright.run.record import Off, Recorder, install
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import local, small

#: Rates of AdamW's means, its least denominator, and the part of a matrix that is taken away.
BETAS, EPS, DECAY = local.SETTINGS.betas, local.SETTINGS.eps, local.SETTINGS.weight_decay


def public(model, rows: int, length: int, step: int) -> torch.Tensor:
    """The tokens that all replicas see in a step."""
    made = torch.Generator().manual_seed(step)
    return torch.randint(0, model.vocab, (rows, length + 1), generator=made)


def by_hand(rank: int, model, train: Train, last: int, turns: tuple[tuple[tuple[int, ...], ...], ...], said: dict):
    """Losses, norms, parameters and heads [vocab, hidden] of every replica: its own text by a trainer of one process,
    public text and what is learnt of it by the equations, and its further heads updated by those of AdamW. `turns`:
    whom each hears in a step, over and over."""
    many = len(turns[0])
    share = Train(global_batch=train.global_batch // many, seq_len=train.seq_len, dtype=train.dtype)
    settings = msgspec.structs.replace(local.SETTINGS, clip=1.0)
    trainers = [Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=settings) for _ in range(many)]
    size = (model.vocab, model.hidden)

    def first(k: int) -> torch.Tensor:
        part = Part(f"taught_heads.{k}.lm_head.weight", size, (0, 0), (slice(None),))
        return drawn(part, settings.seed, 0.02).double().requires_grad_()

    heads = [[first(k) for k in range(said["heads"])] for _ in range(many)]
    means = [[(torch.zeros(size).double(), torch.zeros(size).double()) for _ in mine] for mine in heads]
    seen: list[list] = [[] for _ in range(many)]
    for step in range(last):
        chain, points, losses, neighbours = [], [], [], turns[step % len(turns)]
        for i, trainer in enumerate(trainers):
            for exchange in trainer.exchanges:
                exchange.reset()
            batch = small.batch(train, model.vocab, step, many, i)
            losses.append(float(trainer.pipeline.run(trainer.passes(batch))))
            tokens = public(model, 1, train.seq_len, step)
            one = trainer.passes(batch)[0]._replace(tokens=tokens[:, :-1])
            stage = trainer.stages[0]
            x = stage.embedding(one)
            for layer in stage.layers:
                x = layer(x, one)
            x = stage.head.norm(x).reshape(-1, model.hidden)
            own = torch.log_softmax(x.detach() @ stage.head.weight.detach().T, -1)
            chain.append([own, *(torch.log_softmax(x @ head.T, -1) for head in heads[i])])
            points.append(x / x.norm(dim=-1, keepdim=True))
        wanted = []
        for i in range(many):
            loss = 0.0
            for k in range(1, said["heads"] + 1):
                for t in range(train.seq_len):
                    every = [chain[j][k - 1][t].detach() for j in neighbours[i]]
                    teacher = max(every, key=lambda logs: float(logs.max()))
                    if said["top"]:
                        kept = teacher.sort(descending=True).indices[: said["top"]]
                        shares = teacher[kept].exp() / teacher[kept].exp().sum()
                        loss = loss - said["aux"] * (shares * chain[i][k][t, kept]).sum() / train.seq_len
                    else:
                        loss = loss - said["aux"] * (teacher.exp() * chain[i][k][t]).sum() / train.seq_len
            for j in neighbours[i]:
                apart = ((points[i] - points[j].detach()) ** 2).sum(-1).mean()
                loss = loss + said["embed"] * apart
            wanted.append(loss)
        for i, trainer in enumerate(trainers):
            wanted[i].backward()
            for exchange in trainer.exchanges:
                exchange.finish()
            squares = sum(float(h.gradient.square().sum()) for h in trainer.optimizer.held)
            squares += sum(float(head.grad.square().sum()) for head in heads[i])
            seen[i].append((losses[i], squares**0.5))
            trainer.optimizer.update(step, squares**0.5)
            trainer.publish()
            scale, rate = min(1.0, settings.clip / (squares**0.5 + 1e-6)), settings.lr_at(step)
            for head, (mean, square) in zip(heads[i], means[i]):
                gradient = head.grad * scale
                mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
                square.mul_(BETAS[1]).add_(gradient**2, alpha=1 - BETAS[1])
                along = mean / (1 - BETAS[0] ** (step + 1))
                along = along / ((square / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS)
                head.data.mul_(1 - rate * DECAY).sub_(along, alpha=rate)
                head.grad = None
            trainer.step_count += 1
    return [(a, local.state(t), [h.detach() for h in mine]) for a, t, mine in zip(seen, trainers, heads)]


def trained(rank: int, model, text: str, train: Train, last: int, settings=local.SETTINGS):
    """The losses and norms of a rank, its state, and (operation, bytes) of all that it exchanged with others."""
    settings = msgspec.structs.replace(settings, clip=1.0)
    trainer = local.begun(model, text, train, settings)
    trainer.lessons.text = lambda step: small.Batch(public(model, 1, train.seq_len, step), None)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=last)
    install(recorder)
    seen = local.steps(trainer, 0, last)
    install(Off())
    found = recorder.recording()
    labels = [found.labels[i] for i in found.label.tolist()]
    return seen, local.state(trainer), [(one.kind, one.num_bytes) for one in labels if one.queue == "dp"]
