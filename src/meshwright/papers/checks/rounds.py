"""Training in rounds: replicas that step on their own and average now and then."""

from __future__ import annotations

import numpy as np

from meshwright.papers import figures
from meshwright.papers.outcome import SHOWN, WITHIN, Check, Fact, Figure, Outcome, at_most, equal
from meshwright.sync.codecs.sigma8 import DEVIATIONS, LEVELS, SIGMA8
from meshwright.sync.reference.least_squares import LeastSquares, coded
from meshwright.sync.reference.rounds import rounds

#: Bits of a parameter's change as it is sent.
FP32, INT8 = 32, 8
#: Least squares on eight replicas.
PROBLEM = LeastSquares()


def diloco() -> Outcome:
    """Rounds of 500 steps against a step's exchange, and what both reach."""
    w, together = PROBLEM.synchronous(5_000, 0.05)
    found, apart = rounds(PROBLEM, 5_000, 500, 0.05, momentum=0.0, outer=1.0)
    nesterov, _ = rounds(PROBLEM, 5_000, 500, 0.05, outer=0.7, momentum=0.3)
    plain, _ = rounds(PROBLEM, 200, 1, 0.05, outer=1.0, momentum=0.0)
    same, _ = PROBLEM.synchronous(200, 0.05)
    best = PROBLEM.loss(w)
    return Outcome(
        figures=(
            equal("elements sent, synchronous over rounds of 500", 500, together / apart, unit="x", restated=True),
            Figure("loss of rounds over synchronous", 1.0, PROBLEM.loss(found) / best, "x", SHOWN),
            Figure(
                "loss of rounds with Nesterov over synchronous",
                1.0,
                PROBLEM.loss(nesterov) / best,
                "x",
                SHOWN,
            ),
            at_most(
                "rounds of one step against synchronous, largest difference", float(np.abs(plain - same).max()), 1e-12
            ),
        ),
        baseline="gradients averaged every step by the same 8 replicas",
        assumptions=(
            "least squares, 8 replicas with a shard each, plain steps inside a round where the paper has AdamW",
            "the paper's perplexities on C4 are not simulated",
        ),
        missing=(
            "the outer Nesterov step as a word of a plan: sync=local averages parameters",
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
            equal("bits sent by synchronous steps over rounds of 100 in int8", 400, saved, unit="x", restated=True),
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


def _quantised_error() -> float:
    """The error of a mean of values sent in eight bits, over one quantisation step."""
    values = np.random.default_rng(1).standard_normal((4, 1000))
    step = 2 * DEVIATIONS * values.std(axis=1).max() / LEVELS
    return float(np.abs(coded(SIGMA8)(values).mean(axis=0) - values.mean(axis=0)).max() / step)


def _in_rounds() -> tuple[float, bool]:
    """Quantised rounds of 100 with two nodes away, different ones every time: the bits that synchronous steps send over
    theirs, and whether they end near the same loss."""
    w, together = PROBLEM.synchronous(3000, 0.05)
    away = lambda number: (number % 8, (number + 3) % 8)  # noqa: E731
    found, apart = rounds(PROBLEM, 3000, 100, 0.05, 1.0, 0.0, coded(SIGMA8), away)
    return together * FP32 / (apart * INT8), PROBLEM.loss(found) < 1.1 * PROBLEM.loss(w)


CHECKS = {"diloco": Check(diloco), "intellect-1": Check(intellect)}
