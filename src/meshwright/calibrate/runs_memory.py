"""Memory of the user's own stack, from runs that state their peaks: what it keeps of activations, and how sure that is.

A peak is linear in the copies of activations that a stack keeps, so two simulations of a run say what any number of
copies would hold; the number is where the runs and the prior, which is the profile's own, agree best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Protocol

import msgspec
import numpy as np

from meshwright.answer.rank_memory import OVERHEAD, RESERVED, rank_memory
from meshwright.cost import Costs, Framework
from meshwright.plan import Plan
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Spread of the copies' logarithm over the stacks whose peaks were fitted (1 to 1.5), and relative error of a peak that
#: copies cannot say: that of fitted profiles.
COPIES_SIGMA, PEAK_SIGMA = 0.25, 0.10
#: No spread of peaks is smaller: allocators round and fragment.
LEAST_SIGMA = 0.05
COPIES = np.linspace(0.5, 4.0, 141)


class PeakRun(Protocol):
    """A run with its peak in bytes, 0 where it states none, and what that is of."""

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    peak_bytes: float
    peak_kind: str


def with_peaks(runs: Sequence[PeakRun], base: Framework, costs_of: Callable[[Framework], Costs]) -> Framework:
    """Return a profile whose copies of activations, and spread of peaks, are those of the runs that state a peak; as it
    is where none does."""
    told = [run for run in runs if run.peak_bytes > 0]
    if not told:
        return base
    once, twice = (_held(told, base, copies, costs_of) for copies in (1.0, 2.0))
    measured = np.array([run.peak_bytes for run in told])
    held = np.maximum(once + (COPIES[:, None] - 1.0) * (twice - once), 1.0)
    wrong = np.log(held / measured)
    loss = (wrong**2).sum(axis=1) / PEAK_SIGMA**2 + (np.log(COPIES / base.activation_copies) / COPIES_SIGMA) ** 2
    best = int(loss.argmin())
    spread = float(np.sqrt((wrong[best] ** 2).mean()))
    # what is known of the spread before counts as one run more
    sigma = max(LEAST_SIGMA, ((len(told) * spread**2 + base.memory_sigma**2) / (len(told) + 1)) ** 0.5)
    return msgspec.structs.replace(base, activation_copies=float(COPIES[best].round(3)), memory_sigma=round(sigma, 3))


def _held(
    runs: Sequence[PeakRun], base: Framework, copies: float, costs_of: Callable[[Framework], Costs]
) -> np.ndarray:
    """Return the bytes of each run's fullest rank under so many copies, of the kind that the run states."""
    costs = costs_of(msgspec.structs.replace(base, activation_copies=copies))
    out = []
    for run in runs:
        ranks = rank_memory(simulate(run.plan, run.model, run.cluster, run.train, costs), costs)
        beside = RESERVED if run.peak_kind == "reserved" else ()
        out.append(max(sum(v for c, v in r.alive.items() if c not in OVERHEAD or c in beside) for r in ranks))
    return np.array(out)


def peak_errors(runs: Sequence[PeakRun], base: Framework, costs_of: Callable[[Framework], Costs]) -> list[float]:
    """Return the logarithms of predicted over measured peaks of the runs that state one."""
    told = [run for run in runs if run.peak_bytes > 0]
    held = _held(told, base, base.activation_copies, costs_of) if told else ()
    return [log(p / run.peak_bytes) for p, run in zip(held, told)]
