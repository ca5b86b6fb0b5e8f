"""Gradient codecs: PowerSGD's factors, and ternary gradients."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from meshwright.papers.checks.images import terngrad_on_digits
from meshwright.papers.outcome import WITHIN, Check, Fact, Figure, Outcome, at_most, below, by_processes
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.codecs.powersgd import begun, factors, summed
from meshwright.sync.reference.least_squares import LeastSquares

#: A convolution's weights as outputs x (inputs x height x width), as the paper flattens them.
_STAGES = ((64, 64), (64, 128), (128, 256), (256, 512))
#: The matrices of its two models (1905.13727, appendix F), and how many numbers their vectors have: ResNet-18 for 10
#: classes, and an LSTM of three layers of 650 for the 28869 words of WikiText-2, whose output shares their table.
RESNET18 = (
    Tensor(64, 3 * 9),
    *(
        one
        for inputs, width in _STAGES
        for one in (
            Tensor(width, inputs * 9),
            Tensor(width, width * 9, 3),
            *((Tensor(width, inputs),) if inputs != width else ()),
        )
    ),
    Tensor(10, 512),
)
RESNET18_VECTORS = 2 * (64 + sum(width * (4 + (inputs != width)) for inputs, width in _STAGES)) + 10
LSTM = (Tensor(28869, 650), Tensor(4 * 650, 650, 6))
LSTM_VECTORS = 6 * 4 * 650 + 28869


#: Data sent for an epoch over SGD's, by rank (tables 3 and 4).
RESNET18_SENT, LSTM_SENT = ((1, 243), (2, 136), (4, 72)), ((1, 310), (2, 203), (4, 120))


def _ratio(model: str, rank: int, paper: float, ours: float) -> Figure:
    return Figure(f"data of {model} over that of rank {rank}, table 3 or 4", paper, ours, "x", WITHIN, 0.01)


def sent_less(rank: int, tensors: tuple[Tensor, ...], vectors: int) -> float:
    """Return how many times less a step sends of such matrices and vectors in factors of a rank."""
    n = vectors + sum(one.size for one in tensors)
    return 4 * n / sum(codec(f"powersgd:rank={rank}").messages(n, 4, tensors))


def powersgd() -> Outcome:
    """The bytes of its two models in the codec that both executors use, and what error feedback keeps."""
    rng = np.random.default_rng(0)
    workers, n, m = 4, 64, 48
    shape = factors(n * m, (Tensor(n, m),), rank=2)
    applied, total, errors, misses = np.zeros((n, m)), np.zeros((n, m)), np.zeros((workers, n, m)), []
    full, q = rng.standard_normal((workers, n, m)) + rng.standard_normal((n, m)), begun(shape[0])
    for _ in range(200):
        fed = full + errors
        ranks = [summed([one[None]], [q]) for one in fed]
        left = sum(next(one)[0] for one in ranks)
        right = sum(one.send([left.copy()])[0] for one in ranks)
        product, q = _ended(ranks[0], right)
        errors = fed - product / workers
        applied, total = applied + product / workers, total + full.mean(axis=0)
        misses.append(float(np.linalg.norm(applied - total) / np.linalg.norm(total)))
    held = np.abs(applied + errors.mean(axis=0) - total).max() < 1e-6
    return Outcome(
        figures=(
            *(
                _ratio("ResNet-18", rank, paper, sent_less(rank, RESNET18, RESNET18_VECTORS))
                for rank, paper in RESNET18_SENT
            ),
            *(_ratio("LSTM", rank, paper, sent_less(rank, LSTM, LSTM_VECTORS)) for rank, paper in LSTM_SENT),
            at_most("what is lost after 200 steps with the error fed back, of what was sent", misses[-1], 0.2),
            below("loss after 200 steps over after 20", misses[-1] / misses[19]),
        ),
        facts=(Fact("error feedback loses nothing: what was not applied is still held", bool(held)),),
        baseline="an all-reduce of the whole gradient",
        assumptions=("its accuracies, and times on models that are no transformers, are not simulated",),
    )


def _ended(rank: Generator, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The end of a power iteration of one matrix: the product [rows, columns] and the next q."""
    try:
        rank.send([right])
    except StopIteration as done:
        (p,), (q,) = done.value
        return (p @ q.swapaxes(-1, -2))[0], q
    raise AssertionError("a power iteration has two messages")


#: Parameters of AlexNet, the largest model that the paper trains.
ALEXNET = 61_000_000


def terngrad() -> Outcome:
    """The code's expectation and size, and where steps with it end."""
    rng = np.random.default_rng(0)
    gradients = rng.uniform(-1, 1, (4, 200))  # nothing lies beyond 2.5 deviations
    mean = np.mean([ternary(gradients, seed) for seed in range(1000)], axis=0)
    problem = LeastSquares(8, 10, seed=5)
    exact, coded = np.zeros(10), np.zeros(10)
    for step in range(1, 1501):
        rate = 0.1 / (1 + step / 100)
        exact = exact - rate * problem.slopes(exact).mean(axis=0)
        coded = coded - rate * ternary(problem.slopes(coded), step).mean(axis=0)
    return Outcome(
        figures=(
            Figure(
                "bytes of 32-bit gradients over those sent, of 61 million: 16 less what the scale takes",
                16.0,
                4 * ALEXNET / codec("terngrad").wire_bytes(ALEXNET, 4),
                "x",
                WITHIN,
                1e-6,
                restated=True,
            ),
            at_most(
                "largest error of the mean of 1000 codes, five deviations of a number below 1",
                float(np.abs(mean - gradients).max()),
                5 / 1000**0.5,
            ),
            at_most("loss of coded over exact steps", problem.loss(coded) / problem.loss(exact), 1.05, unit="x"),
        ),
        baseline="the same steps with 32-bit gradients",
        assumptions=(
            "least squares, 8 workers, falling rates; the paper's accuracies are not simulated",
            "each worker's codes are of its own largest: gathered, not summed on their way; nothing is clipped",
        ),
    )


def ternary(gradients: np.ndarray, seed: int) -> np.ndarray:
    """Return what arrives of every worker's gradients [workers, n]."""
    one, n = codec("terngrad"), gradients.shape[1]
    seeds = range(seed * len(gradients), (seed + 1) * len(gradients))
    return np.array([one.decoded(one.encoded(x, s), n, x.dtype, s) for x, s in zip(gradients, seeds)])


CHECKS = {
    "powersgd": Check(powersgd),
    "terngrad": Check(lambda: by_processes(terngrad(), "training on digits", terngrad_on_digits)),
}
