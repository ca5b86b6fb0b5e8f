"""Training in rounds: replicas that step on their own and average now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.papers import figures
from meshwright.papers.outcome import AT_MOST, SHOWN, WITHIN, Check, Fact, Figure, Outcome

#: Bits of a parameter's change as it is sent.
FP32, INT8 = 32, 8


class Run:
    """Least squares by replicas that each hold a shard of the examples; counts the numbers a replica sends."""

    def __init__(self, replicas: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.features = rng.standard_normal((replicas, 64, 8))
        self.targets = self.features @ rng.standard_normal(8) + 0.1 * rng.standard_normal((replicas, 64))
        self.start, self.sent = np.zeros(8), 0

    def slopes(self, w: np.ndarray) -> np.ndarray:
        """Every replica's gradient, [replicas, 8], at its own row of `w` (or all at one point)."""
        at = np.broadcast_to(w, (len(self.features), w.shape[-1]))
        wrong = np.einsum("rni,ri->rn", self.features, at) - self.targets
        return np.einsum("rni,rn->ri", self.features, wrong) / self.features.shape[1]

    def loss(self, w: np.ndarray) -> float:
        return float(np.mean((self.features @ w - self.targets) ** 2))

    def synchronous(self, steps: int, rate: float) -> np.ndarray:
        """Gradients averaged every step."""
        w = self.start.copy()
        for _ in range(steps):
            w = w - rate * self.slopes(w).mean(axis=0)
            self.sent += w.size
        return w

    def rounds(
        self,
        steps: int,
        every: int,
        rate: float,
        outer: float = 0.7,
        momentum: float = 0.9,
        send: Callable[[np.ndarray], np.ndarray] = np.asarray,
        away: Callable[[int], Sequence[int]] = lambda number: (),
    ) -> np.ndarray:
        """DiLoCo: `every` steps alone, then the mean change is the gradient of a Nesterov step (Douillard et al., 2023,
        2311.08105). `send` is what becomes of changes on their way, `away` which replicas miss a round: who comes back
        starts from the shared weights."""
        shared, speed = self.start.copy(), np.zeros_like(self.start)
        for number in range(steps // every):
            here = [r for r in range(len(self.features)) if r not in away(number)]
            own = np.tile(shared, (len(self.features), 1))
            for _ in range(every):
                own = own - rate * self.slopes(own)
            change = send(shared - own[here]).mean(axis=0)
            self.sent += change.size
            speed = momentum * speed + change
            shared = shared - outer * (change + momentum * speed)
        return shared


def diloco() -> Outcome:
    """Rounds of 500 steps against a step's exchange, and what both reach."""
    together, apart, once = Run(8), Run(8), Run(8)
    steps = 5_000
    w = together.synchronous(steps, 0.05)
    found = apart.rounds(steps, 500, 0.05, momentum=0.0, outer=1.0)
    nesterov = Run(8).rounds(steps, 500, 0.05, outer=0.7, momentum=0.3)
    plain = once.rounds(200, 1, 0.05, outer=1.0, momentum=0.0)
    same = Run(8).synchronous(200, 0.05)
    return Outcome(
        figures=(
            Figure(
                "numbers sent, synchronous over rounds of 500",
                500,
                together.sent / apart.sent,
                "x",
                WITHIN,
                0.0,
                restated=True,
            ),
            Figure("loss of rounds over synchronous", 1.0, together.loss(found) / together.loss(w), "x", SHOWN),
            Figure(
                "loss of rounds with Nesterov over synchronous",
                1.0,
                together.loss(nesterov) / together.loss(w),
                "x",
                SHOWN,
            ),
            Figure(
                "rounds of one step against synchronous, largest difference",
                None,
                float(np.abs(plain - same).max()),
                "",
                AT_MOST,
                1e-12,
            ),
        ),
        baseline="gradients averaged every step by the same 8 replicas",
        assumptions=(
            "least squares, 8 replicas with a shard each, plain steps inside a round where the paper has AdamW",
            "the paper's perplexities on C4 are not simulated",
        ),
        missing=(
            "its loss: on least squares one average at the very end would do as well, so that ours is only shown",
        ),
    )


def intellect() -> Outcome:
    """Compute utilisation and MFU of its Table 2 from its times, and what rounds of 100 in int8 save."""
    table = figures.load("diloco")["intellect1_T2"]
    round_s = 38 * 60
    saved, near = _in_rounds()
    shown = []
    for row in table["rows"]:
        share = round_s / (round_s + row["allreduce_s"])
        shown.append(
            Figure(f"compute utilisation, {row['where']}", row["CU"], 100 * share, "%", WITHIN, 0.005, restated=True)
        )
        shown.append(
            Figure(f"MFU, {row['where']}", row["MFU"], table["baseline_MFU"] * share, "%", WITHIN, 0.005, restated=True)
        )
    return Outcome(
        figures=(
            *shown,
            Figure(
                "bits sent by synchronous steps over rounds of 100 in int8", 400, saved, "x", WITHIN, 0.0, restated=True
            ),
        ),
        facts=(
            Fact("a quantised mean is within a step of the mean", _quantised_error() <= 1.0),
            Fact("rounds of 100 in int8, with nodes away in turn, end near the loss of synchronous steps", near),
        ),
        baseline="the same nodes without exchange: 43.3% MFU",
        assumptions=(
            "100 inner steps take 38 minutes on 8 H100, all-reduces the table's seconds: what links give is an input",
            "least squares, 8 replicas, for the loss",
        ),
        missing=("what its links give: its utilisation follows from the table's own seconds of all-reduce",),
    )


def in_int8(values: np.ndarray) -> np.ndarray:
    """Values as they arrive when sent as 256 levels between six standard deviations either side of the mean."""
    low, width = _levels(values)
    return low + (np.clip((values - low) // width, 0, 255) + 0.5) * width


def _levels(values: np.ndarray) -> tuple[float, float]:
    mean, spread = float(values.mean()), float(values.std()) or 1e-12
    return mean - 6 * spread, 12 * spread / 256


def _quantised_error() -> float:
    """The error of a mean of values sent in int8, over one quantisation step."""
    values = np.random.default_rng(1).standard_normal((4, 1000))
    return float(np.abs(in_int8(values).mean(axis=0) - values.mean(axis=0)).max() / _levels(values)[1])


def _in_rounds() -> tuple[float, bool]:
    """Quantised rounds of 100 with two nodes away, different ones every time: the bits that synchronous steps send over
    theirs, and whether they end near the same loss."""
    together, apart = Run(8), Run(8)
    wanted = together.loss(together.synchronous(3000, 0.05))
    found = apart.rounds(3000, 100, 0.05, 1.0, 0.0, in_int8, lambda number: (number % 8, (number + 3) % 8))
    return together.sent * FP32 / (apart.sent * INT8), apart.loss(found) < 1.1 * wanted


CHECKS = {"diloco": Check(diloco), "intellect-1": Check(intellect)}
