"""Replicas that step and meet by clocks of their own, for tests: all of them by hand in one process with numpy."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from meshwright.sync.clocks import Clocks
from tests.run import local, small


def by_hand(rank: int, model, train: Train, replicas: int, last: int, clocks: Clocks):
    """Losses and the state of every replica: all ticks in the order of their times, six values [6, values] for every
    parameter of each replica in numpy, of which a trainer has the first when it takes a gradient."""
    share = Train(
        global_batch=train.global_batch // replicas, seq_len=train.seq_len, dtype=train.dtype, optimizer="sgd"
    )
    settings = msgspec.structs.replace(local.SETTINGS, clip=0.0)
    trainers = [Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=settings) for _ in range(replicas)]
    kappa, peak = clocks.condition, settings.lr
    steep = 1 / (4 * peak)
    nu = steep / kappa / 2
    root = np.sqrt(nu / steep)
    laplacian = np.zeros((replicas, replicas))
    for i in range(replicas):  # a ring
        laplacian[i, i] += 2
        laplacian[i, (i + 1) % replicas] -= 1
        laplacian[i, (i - 1) % replicas] -= 1
    laplacian /= replicas  # as many edges, with equal chances
    chi = 1 / sorted(np.linalg.eigvalsh(laplacian))[1] / (clocks.meetings * replicas / 2)

    def six(h) -> np.ndarray:
        x = h.master.numpy().astype(float)
        return np.stack([x, x, -nu * x, -nu * x, 0 * x, 0 * x])

    kept = [[six(h) for h in trainer.optimizer.held] for trainer in trainers]
    at, seen = [0.0] * replicas, [[] for _ in range(replicas)]

    def moved(i: int, to: float) -> None:
        """The equation by the powers of its matrix."""
        x, xm, y, ym, z, zm = range(6)
        flow = np.zeros((6, 6))
        flow[x, x], flow[x, xm] = -root / 8, root / 8
        flow[xm, x], flow[xm, xm] = root / 8, -root / 8
        flow[y, y], flow[y, ym] = -root / 4, root / 4
        flow[ym, xm], flow[ym, y], flow[ym, z] = -nu / (2 * root), -1 / (2 * root), -1 / (2 * root)
        flow[z, z], flow[z, zm] = -root / 4, root / 4
        flow[zm, z], flow[zm, zm] = root / 8, -root / 8
        powers, term = np.eye(6), np.eye(6)
        for k in range(1, 60):
            term = term @ flow * (to - at[i]) / k
            powers = powers + term
        kept[i] = [powers @ one for one in kept[i]]
        at[i] = to

    for step in range(last):
        for tick in clocks.ticks(replicas, step):
            i, j = tick.replica, tick.other
            moved(i, step + tick.at)
            if j >= 0:
                moved(j, step + tick.at)
                for one, other in zip(kept[i], kept[j]):
                    apart = one[2] + one[4] - other[2] - other[4]
                    for own, sign in ((one, 1), (other, -1)):
                        own[4] -= sign * apart / 2
                        own[5] -= sign * 2 * chi / root * apart
                continue
            trainer = trainers[i]
            for h, one in zip(trainer.optimizer.held, kept[i]):
                h.master.copy_(torch.from_numpy(one[0]))
            trainer.publish()
            result = trainer.step(small.batch(train, model.vocab, step, replicas, i))
            seen[i].append((result.loss, result.grad_norm))
            rate = settings.lr_at(step)
            for h, one in zip(trainer.optimizer.held, kept[i]):
                decay = settings.weight_decay * one[0] if h.decays else 0.0
                along = h.gradient.numpy() + decay - nu * one[0] - one[3]
                one[0] -= rate * along
                one[1] -= rate / root * along
                one[3] += (root / 4 + 1) * along
        for i in range(replicas):
            moved(i, step + 1.0)
    for trainer, mine in zip(trainers, kept):
        for h, one in zip(trainer.optimizer.held, mine):
            h.master.copy_(torch.from_numpy(one[0]))
    duals = [[one[4] for one in mine] for mine in kept]
    return [(a, local.state(t)) for a, t in zip(seen, trainers)], duals
