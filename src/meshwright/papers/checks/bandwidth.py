"""Bandwidth of replicas that average now and then: Streaming DiLoCo's Table 4, and its fragments trained in turn.

Douillard et al., 2025 (arXiv 2501.18512). A step's backward takes two thirds of it; a layer's gradient is there when
its backward is done, and reductions follow one another on the link. What is not done when the backward ends is waited
for, or, with overlap, only what is not done one step later. Compute utilisation is compute over compute and waiting.
What a reduction costs on the link is read off one line of the table, which is then not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.papers import figures
from meshwright.papers.outcome import AT_LEAST, WITHIN, Check, Fact, Figure, Outcome, at_most, equal
from meshwright.sync.codecs.fp4 import FP4
from meshwright.sync.reference.least_squares import LeastSquares, coded
from meshwright.sync.reference.rounds import rounds
from meshwright.sync.reference.streaming import LATE, MIX, MOMENTUM, OUTER, streamed

#: Utilisations of the table's columns, the bandwidths it tries, steps of a round, and layers of a fragment.
WANTED = (0.50, 0.80, 0.90, 0.95, 0.99)
TRIED = np.logspace(-1, 3, 50)
ROUND, FRAGMENT = 100, 3
#: The line of the table that the cost of a reduction is read off: size of the model, and way to reduce.
READ = ("1B", "DP")
#: The way each row of the table reduces: rounds or steps, fragments, steps of overlap, share of the bits.
WAYS = {
    "DP": (1, False, 0, 1.0),
    "DiLoCo": (ROUND, False, 0, 1.0),
    "Streaming": (ROUND, True, 0, 1.0),
    "Streaming_overlap": (ROUND, True, 1, 1.0),
    "Streaming_overlap_FP4": (ROUND, True, 1, 0.25),
}


def waited_s(layers: Iterable[int], of: int, step_s: float, layer_s: float, overlap: int) -> float:
    """Seconds of waiting after the step whose gradients of some layers are reduced, the last layer first; each takes
    `layer_s` on the link."""
    backward_s, done = step_s * 2 / 3, 0.0
    for layer in sorted(layers, reverse=True):
        done = max(done, (of - layer) * backward_s / of) + layer_s
    return max(0.0, done - backward_s - overlap * step_s)


def utilisation(way: str, layers: int, step_s: float, gbits: float, gbit_s: float) -> float:
    """Share of time in which is computed."""
    every, fragments, overlap, share = WAYS[way]
    count = layers // FRAGMENT if fragments else 1
    # a fragment's layers lie a stride apart
    cut = [range(first, layers, count) for first in range(count)]
    layer_s = share * gbits / layers / gbit_s
    waited = sum(waited_s(part, layers, step_s, layer_s, overlap) for part in cut)
    return every * step_s / (every * step_s + waited)


def needed(way: str, layers: int, step_s: float, gbits: float, wanted: float) -> int:
    """Return the index of the first of the bandwidths tried that reaches a utilisation."""
    return next(i for i, b in enumerate(TRIED) if utilisation(way, layers, step_s, gbits, b) >= wanted)


def nearest(cells: Iterable[float]) -> list[int]:
    """Return the index of the nearest of the bandwidths tried for each cell of a line."""
    return [int(np.abs(np.log(TRIED / cell)).argmin()) for cell in cells]


def read_off(cells: Iterable[float], way: str, layers: int, step_s: float) -> float:
    """Gigabits of one reduction: the middle of those with which a line of the table comes out cell by cell."""
    least, most = 0.0, np.inf
    for wanted, cell in zip(WANTED, nearest(cells)):
        low, high = 1e-6, 1e6  # gigabits over gigabits a second: the seconds of a reduction that are just short enough
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if utilisation(way, layers, step_s, middle, 1.0) >= wanted else (low, middle)
        least, most = max(least, low * TRIED[cell - 1]), min(most, low * TRIED[cell])
    return float(np.sqrt(least * most))


def streaming() -> Outcome:
    """Table 4 cell by cell; then fragments of a small problem averaged in turn."""
    table = figures.load("diloco")["streaming_diloco_T4_gbit_s"]
    size, way = READ
    billion = read_off(table[size][way], way, table[size]["layers"], table[size]["step_s"])
    apart, saved = [], {}
    for size in ("1B", "10B", "100B"):
        row = table[size]
        asked = row["layers"], row["step_s"], billion * float(size.removesuffix("B"))
        ours = {way: [needed(way, *asked, wanted) for wanted in WANTED] for way in WAYS}
        said = {way: nearest(row[way]) for way in WAYS}
        judged = [way for way in WAYS if (size, way) != READ]
        apart += [abs(a - b) for way in judged for a, b in zip(ours[way], said[way])]
        at = WANTED.index(0.95)
        last = "Streaming_overlap_FP4"
        saved[size] = row["DP"][at] / row[last][at], TRIED[ours["DP"][at]] / TRIED[ours[last][at]]
    cells, near_by, same = len(apart), sum(a <= 1 for a in apart), sum(a == 0 for a in apart)
    trained = _trained()
    return Outcome(
        figures=(
            Figure(f"cells of Table 4 within one bandwidth tried, of {cells}", cells, near_by, "", AT_LEAST, 0.95),
            Figure(f"cells of Table 4 that are the same, of {cells}", cells, same, "", AT_LEAST, 0.75, why=CELLS),
            *(
                Figure(
                    f"{size}: bandwidth for 95%, every step over all it does",
                    *both,
                    "x",
                    WITHIN,
                    0.25,
                    why=GRID,
                    headline=True,
                )
                for size, both in saved.items()
            ),
            *trained.figures,
        ),
        facts=trained.facts,
        baseline="gradients reduced every step, and DiLoCo's whole rounds",
        assumptions=(
            f"{billion:.1f} Gbit a billion parameters and reduction is read off the table's line of {' '.join(READ)}, "
            "whose five cells are not judged; its step times, layers, rounds of 100 and fragments of 3 layers are the "
            "paper's",
            f"least squares, 8 replicas, plain steps inside a round, for the loss; a mean is {LATE} steps late and "
            f"mixed by {MIX:g}, outer step {OUTER:g} with momentum {MOMENTUM:g}: assumed; the paper's losses are not "
            "simulated",
        ),
    )


CELLS = "each of the others is the neighbouring bandwidth, a fifth more or less"
GRID = "both bandwidths are of a list whose entries lie a fifth apart"


def _trained(every: int = ROUND, fragments: int = 4, steps: int = 4000) -> Outcome:
    """Fragments in turn, late, mixed and in four bits, against synchronous steps and, where nothing of that is on,
    against DiLoCo's rounds."""
    problem = LeastSquares()
    wanted = problem.loss(problem.synchronous(steps, 0.05)[0])
    found = streamed(problem, steps, every, fragments)
    # a few rounds: at their end all ways are the same
    plain = streamed(problem, 30, 10, 1, late=0, mix=0.0, send=np.asarray).shared
    whole, _ = rounds(problem, 30, 10, 0.05, OUTER, MOMENTUM)
    once = (found.sent.sum(axis=0) == steps // every).all() and found.sent.sum(axis=1).max() == 1
    codes = np.unique(coded(FP4)(np.random.default_rng(2).standard_normal(10_000)))
    bits = steps * 32 / (found.sent[:, 0].sum() * 4)
    return Outcome(
        figures=(
            at_most(
                "loss of fragments in turn over synchronous steps", problem.loss(found.shared) / wanted, 1.05, unit="x"
            ),
            at_most(
                "whole, at once and unmixed: furthest from DiLoCo's rounds", float(np.abs(plain - whole).max()), 1e-12
            ),
            equal("bits sent by steps in fp32 over fragments in four", 8 * every, bits, unit="x", restated=True),
        ),
        facts=(
            Fact("a fragment is sent once a round and never two together", once),
            Fact("a number that is sent is one of sixteen at most", codes.size <= 16),
            Fact("mixing leaves replicas as near as it says", bool(np.allclose(found.nearer, MIX))),
        ),
    )


CHECKS = {"streaming-diloco": Check(streaming)}
