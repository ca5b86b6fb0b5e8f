"""Replicas that meet by a graph, for tests: as processes under a plan, and by hand in one process with numpy."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.plan import parse
from meshwright.run.begin import begin
from meshwright.run.checkpoint import AsyncSaver, Meta, identity
from meshwright.run.job import Job
from meshwright.run.mesh import alone, build
from meshwright.run.mixing import MixedMean
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import Among, Fragment
from meshwright.sync.groups import graph, matrix
from meshwright.sync.record import Mix
from tests.run import local, small


def by_hand(rank: int, model, train: Train, replicas: int, last: int, text: str, every: int, overlap: bool, keep: bool):
    """Losses and the state of every replica: one process trains each on its share of the batch, and multiplies what
    all have [replicas, values] by the weights of the turn; with `overlap` what they had a step before. `keep`: matrices
    are spread anew."""
    share = Train(global_batch=train.global_batch // replicas, seq_len=train.seq_len, dtype=train.dtype)
    trainers = [
        Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(replicas)
    ]
    turns = [matrix(turn) for turn in graph(text, replicas).turns]
    seen: list[list] = [[] for _ in trainers]
    late: list[np.ndarray] | None = None
    for step in range(last):
        for index, trainer in enumerate(trainers):
            result = trainer.step(small.batch(train, model.vocab, step, replicas, index))
            seen[index].append((result.loss, result.grad_norm))
        pieces = [list(same) for same in zip(*([p for p in t.pieces() if p.key == "param"] for t in trainers))]
        now = [np.stack([p.values.numpy().copy() for p in same]) for same in pieces]
        if late is not None:
            now = [values + change for values, change in zip(now, late)]
            late = None
        if (step + 1) % every == 0:
            weights = turns[((step + 1) // every - 1) % len(turns)]
            mixed = [weights @ values for values in now]
            if keep:
                mixed = [
                    spread(new, weights @ values.var(axis=1)) if len(same[0].parameter.shape) > 1 else new
                    for same, new, values in zip(pieces, mixed, now)
                ]
            if overlap:
                late = [new - values for new, values in zip(mixed, now)]
            else:
                now = mixed
        for same, values in zip(pieces, now):
            for piece, mine in zip(same, values):
                piece.values.copy_(torch.from_numpy(mine))
        for trainer in trainers:
            trainer.publish()
    return [(a, local.state(t)) for a, t in zip(seen, trainers)]


def spread(values: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Rows with the variances given, around the means that they have."""
    mean = values.mean(axis=1, keepdims=True)
    return mean + (values - mean) * np.sqrt(variances / values.var(axis=1))[:, None]


def taken_over(rank: int, model, text: str, then: str, train: Train, root: str):
    """The parameters that a rank had when it saved, and those with which it goes on under another plan."""
    trainer = local.begun(model, text, train)
    local.steps(trainer, 0, 2)
    before = [p.values.clone() for p in trainer.optimizer.pieces() if p.key == "param"]
    saver = AsyncSaver(root, trainer.mesh["world"])
    said = {"sync": trainer.plan.sync.policy, "replicas": trainer.rounds.replicas, "joined": trainer.joined}
    meta = Meta(step=2, seed=0, model=model.name, model_hash=identity(model), plan=text, world=4, extra=said)
    saver.begin(trainer.pieces(), meta)
    saver.wait()
    again = local.begun(model, then, train)
    job = Job(model=model, plan=parse(then), train=train, settings=local.SETTINGS, out=root, resume=True, quiet=True)
    begin(job, again)
    return before, [p.values.clone() for p in again.optimizer.pieces() if p.key == "param"]


def values_of(rank: int, length: int) -> np.ndarray:
    """The values a replica begins with."""
    return np.random.default_rng(rank).standard_normal(length)


def consensus(rank: int, text: str, words: str, share: float, length: int, rounds: int):
    """The values a replica of four has after every one of several exchanges of nothing but its values."""
    fragment = Fragment(
        what="parameters",
        units=(0, 0),
        kind="dense",
        num_elements=length,
        element_bytes=8,
        replica=Among("dp", 4),
        codec=words,
        mix=Mix(graph=text, share=share),
    )
    own = torch.zeros(length, dtype=torch.float64)
    mixing = MixedMean(fragment, [], [own], build(parse("dp4")))
    own.copy_(torch.from_numpy(values_of(rank, length)))  # all began with zeros, which all know
    out = []
    for _ in range(rounds):
        mixing.send()
        mixing.apply()
        out.append(own.clone())
    return torch.stack(out)


def consensus_by_hand(text: str, words: str, share: float, length: int, rounds: int) -> np.ndarray:
    """The same in numpy, [rounds, replicas, values]: CHOCO-Gossip (Koloskova et al. 1902.00340, algorithm 1)."""
    weights, code = matrix(graph(text, 4).turns[0]), codec(words)
    own = np.stack([values_of(rank, length) for rank in range(4)])
    known, out = np.zeros_like(own), []
    for _ in range(rounds):
        known = known + np.stack([code.decode(code.encode(row), length, row.dtype) for row in own - known])
        own = own + share * (weights @ known - known)
        out.append(own)
    return np.stack(out)
