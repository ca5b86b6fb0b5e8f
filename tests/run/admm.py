"""Replicas that keep prices of differing from their neighbours, for tests: as processes, and by hand with numpy."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.plan import parse
from meshwright.run.dual import PricedMean, noise
from meshwright.run.mesh import alone, build
from meshwright.run.pieces import HeldElements, Parameter, Part
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from meshwright.sync.fragments import Among, Fragment
from meshwright.sync.record import Mix
from tests.run import local, small

#: Values, and rows of each replica, of the least squares.
VALUES, ROWS, REPLICAS = 5, 8, 4


def by_hand(rank: int, model, train: Train, replicas: int, last: int, every: int, rho: float, scale: float):
    """Losses and the state of every replica on a ring: one process trains each on its share of the batch, and keeps
    duals and middles [replicas, values] of every parameter in numpy."""
    share = Train(global_batch=train.global_batch // replicas, seq_len=train.seq_len, dtype=train.dtype)
    trainers = [
        Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(replicas)
    ]
    near = [sorted({(i - 1) % replicas, (i + 1) % replicas}) for i in range(replicas)]

    def values() -> list[np.ndarray]:
        return [
            np.stack([h.master.numpy().copy() for h in same]) for same in zip(*(t.optimizer.held for t in trainers))
        ]

    def middle(now: list[np.ndarray], exchanges: int) -> list[np.ndarray]:
        out = [np.stack([(x[i] + x[near[i]].mean(axis=0)) / 2 for i in range(replicas)]) for x in now]
        for i, trainer in enumerate(trainers if scale else ()):
            for x, h in zip(out, trainer.optimizer.held):
                x[i] -= scale / (2**0.5 * rho) * noise(local.SETTINGS.seed, exchanges, i, h, h.master).numpy()
        return out

    duals, middles = [np.zeros_like(x) for x in values()], middle(values(), 0)

    def price(i: int) -> None:
        for h, dual in zip(trainers[i].optimizer.held, duals):
            h.gradient.add_(torch.from_numpy(dual[i]))

    def pull(i: int, rate: float) -> None:
        force = 2 * rho * len(near[i]) * rate
        for h, x in zip(trainers[i].optimizer.held, middles):
            h.master.copy_((h.master + force * torch.from_numpy(x[i])) / (1 + force))

    seen: list[list] = [[] for _ in trainers]
    for index, trainer in enumerate(trainers):
        trainer.rounds.price = lambda index=index: price(index)
        trainer.rounds.pull = lambda rate, index=index: pull(index, rate)
    for step in range(last):
        for index, trainer in enumerate(trainers):
            result = trainer.step(small.batch(train, model.vocab, step, replicas, index))
            seen[index].append((result.loss, result.grad_norm))
        if (step + 1) % every == 0:
            now = values()
            duals = [
                dual + rho * np.stack([(x[i] - x[near[i]]).sum(axis=0) for i in range(replicas)])
                for dual, x in zip(duals, now)
            ]
            middles = middle(now, (step + 1) // every)
    return [(a, local.state(t)) for a, t in zip(seen, trainers)]


def problem(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The matrix and the right side of a replica's least squares."""
    drawn = np.random.default_rng(rank)
    return drawn.standard_normal((ROWS, VALUES)), drawn.standard_normal(ROWS)


def _held(values: torch.Tensor) -> HeldElements:
    whole = Part("x", (VALUES,), (0,), (slice(0, VALUES),))
    parameter = Parameter("x", (VALUES,), (whole,))
    return HeldElements(parameter, 0, VALUES, values, torch.zeros_like(values), 1, False, True)


def least_squares(rank: int, graph: str, rho: float, scale: float, rounds: int, steps: int):
    """The values of a replica after every round of so many steps, and its dual in the end."""
    fragment = Fragment(
        what="parameters",
        units=(0, 0),
        kind="dense",
        num_elements=VALUES,
        element_bytes=8,
        replica=Among("dp", REPLICAS),
        mix=Mix(graph=graph, rho=rho, noise=scale),
    )
    values = torch.zeros(VALUES, dtype=torch.float64)
    held = _held(values)
    priced = PricedMean(fragment, [held], [values], build(parse(f"dp{REPLICAS}")))
    matrix, right = map(torch.from_numpy, problem(rank))
    rate = 1 / float(torch.linalg.matrix_norm(matrix, 2) ** 2)
    out = []
    for _ in range(rounds):
        for _ in range(steps):
            held.gradient.copy_(matrix.T @ (matrix @ values - right))
            priced.price()
            values.sub_(held.gradient, alpha=rate)
            priced.pull(rate)
        priced.send()
        priced.apply()
        out.append(values.clone())
    return torch.stack(out), priced.state["admm_dual"]


def least_squares_by_hand(near: list[list[int]], rho: float, scale: float, rounds: int):
    """The same in numpy, [rounds, replicas, values], with the argmin of a round solved exactly: the authors' algorithm,
    ``argmin f_i(x) + p_i x + rho sum_j |x - (x_i + x_j) / 2 + xi|^2``, and the duals in the end."""
    made = [problem(i) for i in range(REPLICAS)]
    held = _held(torch.zeros(VALUES, dtype=torch.float64))
    now, duals, out = np.zeros((REPLICAS, VALUES)), np.zeros((REPLICAS, VALUES)), []
    for exchanges in range(rounds):
        new = np.zeros_like(now)
        for i, ((matrix, right), some) in enumerate(zip(made, near)):
            moved = scale * 2**0.5 / (2 * rho) * noise(0, exchanges, i, held, held.master).numpy()
            middles = sum((now[i] + now[j]) / 2 - moved for j in some)
            curved = matrix.T @ matrix + 2 * rho * len(some) * np.eye(VALUES)
            new[i] = np.linalg.solve(curved, matrix.T @ right - duals[i] + 2 * rho * middles)
        now = new
        duals = duals + rho * np.stack([sum(now[i] - now[j] for j in some) for i, some in enumerate(near)])
        out.append(now)
    return np.stack(out), duals
