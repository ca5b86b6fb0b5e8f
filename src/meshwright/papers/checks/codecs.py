"""What travels in place of gradients: PowerSGD's factors, and one byte of a projected gradient."""

from __future__ import annotations

import numpy as np

from meshwright.papers.outcome import AT_MOST, BELOW, WITHIN, Check, Fact, Figure, Outcome

ROUNDING = 1e-9


def compress(
    gradients: np.ndarray, right: np.ndarray, errors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One step of PowerSGD on [workers, n, m] gradients: the decoded mean, the next right factor [m, r], the workers'
    errors to feed back, and the numbers a worker sends (Vogels et al., 2019, 1905.13727, algorithm 1)."""
    fed = gradients + errors
    left = np.linalg.qr((fed @ right).mean(axis=0))[0]  # an all-reduce of P, then its columns made orthogonal
    own = fed.swapaxes(1, 2) @ left
    mean = own.mean(axis=0)  # an all-reduce of Q
    decoded = left @ mean.T
    return decoded, mean, fed - decoded, left.size + mean.size


def powersgd() -> Outcome:
    rng = np.random.default_rng(0)
    workers, n, m, rank = 4, 64, 48, 2
    # The mean has rank 2, the workers' own gradients do not: factors add up before they are decoded.
    thin = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, m))
    noise = rng.standard_normal((workers, n, m))
    gradients = thin + noise - noise.mean(axis=0)
    right, errors = rng.standard_normal((m, rank)), np.zeros((workers, n, m))
    decoded, right, _, sent = compress(gradients, right, errors)
    applied, total = np.zeros((n, m)), np.zeros((n, m))
    right, errors, misses = rng.standard_normal((m, rank)), np.zeros((workers, n, m)), []
    full = rng.standard_normal((workers, n, m)) + rng.standard_normal((n, m))
    for _ in range(200):
        step, right, errors, _ = compress(full, right, errors)
        applied, total = applied + step, total + full.mean(axis=0)
        misses.append(float(np.linalg.norm(applied - total) / np.linalg.norm(total)))
    return Outcome(
        figures=(
            Figure(
                "numbers sent, of the whole gradient: r (n + m) / n m",
                rank * (n + m) / (n * m),
                sent / (n * m),
                "",
                WITHIN,
                1e-9,
            ),
            Figure(
                "largest error of a mean of rank r, one power iteration",
                None,
                float(np.abs(decoded - thin).max()),
                "",
                AT_MOST,
                ROUNDING,
            ),
            Figure(
                "what is lost after 200 steps with the error fed back, of what was sent",
                None,
                misses[-1],
                "",
                AT_MOST,
                0.2,
            ),
            Figure("loss after 200 steps over after 20", None, misses[-1] / misses[19], "x", BELOW),
        ),
        facts=(
            Fact("error feedback loses nothing: what was not applied is still held", _held(applied, total, errors)),
        ),
        baseline="an all-reduce of the whole gradient",
        assumptions=("matrices of 64 x 48 on 4 simulated workers; the paper's accuracies are not simulated",),
    )


def _held(applied: np.ndarray, total: np.ndarray, errors: np.ndarray) -> bool:
    return bool(np.abs(applied + errors.mean(axis=0) - total).max() < 1e-6)


def one_byte() -> Outcome:
    """Least squares by workers that share seeds and send a byte each."""
    rng = np.random.default_rng(3)
    features = rng.standard_normal((4, 32, 10))
    targets = features @ rng.standard_normal(10)
    replicas, sent = np.zeros((4, 10)), 0

    def loss(worker: int, w: np.ndarray) -> float:
        return float(np.mean((features[worker] @ w - targets[worker]) ** 2))

    begun = np.mean([loss(r, replicas[r]) for r in range(4)])
    for step in range(1500):
        codes = []
        for worker in range(4):
            along = np.random.default_rng((step, worker)).standard_normal(10)
            w = replicas[worker]
            slope = (loss(worker, w + 1e-3 * along) - loss(worker, w - 1e-3 * along)) / 2e-3
            codes.append(np.int8(np.clip(np.round(slope * 8), -127, 127)))
            sent += codes[-1].nbytes
        for replica in replicas:
            for worker, code in enumerate(codes):
                replica -= 2e-3 * code / 8 * np.random.default_rng((step, worker)).standard_normal(10)
    ended = np.mean([loss(r, replicas[r]) for r in range(4)])
    return Outcome(
        figures=(
            Figure("bytes a projected gradient costs", 1, sent / (1500 * 4), "", WITHIN, 0.0),
            Figure(
                "largest difference between replicas", None, float(np.ptp(replicas, axis=0).max()), "", AT_MOST, 0.0
            ),
            Figure("loss after over before", None, float(ended / begun), "", AT_MOST, 0.1),
        ),
        baseline="gradients of ten 32-bit numbers",
        assumptions=("least squares with ten weights, 4 replicas that share nothing but seeds and bytes",),
    )


CHECKS = {"powersgd": Check(powersgd), "one-byte": Check(one_byte)}
