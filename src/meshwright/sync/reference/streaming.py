"""Streaming DiLoCo: fragments of the weights are averaged in turn, late, mixed and in four bits (Douillard et al.,
2025, arXiv 2501.18512, section 2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.sync.codecs.fp4 import FP4
from meshwright.sync.reference.least_squares import LeastSquares, Send, coded
from meshwright.sync.reference.rounds import outer_step

#: Steps of a mean's way, a replica's own share when it is mixed in, and the outer step.
LATE, MIX, OUTER, MOMENTUM = 5, 0.5, 0.7, 0.3
IN_FOUR_BITS = coded(FP4)


class Streamed(NamedTuple):
    """The shared weights at the end; by step and fragment whether it was sent; and of every mixing how far apart the
    replicas were after it, over before."""

    shared: np.ndarray
    sent: np.ndarray
    nearer: list[float]


def streamed(
    problem: LeastSquares,
    steps: int,
    every: int,
    fragments: int,
    *,
    rate: float = 0.05,
    late: int = LATE,
    mix: float = MIX,
    outer: float = OUTER,
    momentum: float = MOMENTUM,
    send: Send = IN_FOUR_BITS,
) -> Streamed:
    """Train with every fragment's mean change taken once in `every` steps, at a step of its own. It arrives `late`
    steps later, is the gradient of an outer step of the shared fragment, and replicas take `mix` of their own and the
    rest of the shared one."""
    own = np.tile(problem.start, (len(problem.features), 1))
    shared, speed = problem.start.copy(), np.zeros_like(problem.start)
    cut = np.array_split(np.arange(problem.start.size), fragments)
    sent, nearer, coming = np.zeros((steps, fragments)), [], {}
    for step in range(1, steps + 1):
        own = own - rate * problem.slopes(own)
        for number, part in enumerate(cut):
            if step % every == number * every // fragments:
                coming[step + late, number] = send(shared[part] - own[:, part]).mean(axis=0)
                sent[step - 1, number] = 1
            change = coming.pop((step, number), None)
            if change is not None:
                shared[part], speed[part] = outer_step(shared[part], speed[part], change, outer, momentum)
                before = np.ptp(own[:, part], axis=0).max()
                own[:, part] = mix * own[:, part] + (1 - mix) * shared[part]
                nearer.append(float(np.ptp(own[:, part], axis=0).max() / before))
    return Streamed(shared, sent, nearer)
