"""Shared draws: the best plans timed again under the same draws of what is unknown, so that their order has a chance.

Two predictions err together: if matrix products are slower than assumed, they are for both. So a draw moves every plan
alike (common random numbers, Law and Kelton, 2000, section 11.2): one factor for each class of costs (kernels, the
host, links inside and between nodes) and one for all peaks of memory. What a plan does and others do not has an error
of its own: every kind of pass and every exchange has a factor that is drawn once, for all plans that do it. The graphs
stay as they are: a plan's draws are one call of the engine with a batch of durations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.intervals import class_sigma, steps_of
from meshwright.answer.risk import fit_probability
from meshwright.causes import ERROR_CLASS, ERROR_CLASSES, PRICED
from meshwright.lower.program import Program
from meshwright.plan import Plan
from meshwright.search.evaluate import Evaluator
from meshwright.search.ties import Tie
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate

#: Draws of everything that is unknown.
NUM_DRAWS = 40
#: Relative error of a plan's own work, by whether the framework's profile was fitted: the robust standard deviation of
#: log(measured / predicted) about its median in groups of measured plans that differ in their layout alone (the middle
#: of seven sources, docs/accuracy.md), as predicted with the framework's profile and as of unknown software.
OWN_SIGMA = {True: 0.065, False: 0.11}
#: Share of the predicted gain of one plan over another of its group that was measured, likewise, over 114 groups
#: (docs/accuracy.md): below 1 the winner's curse would show.
REALISED = {True: 1.06, False: 1.19}
#: What decides where no class of costs does, and the commands that measure each unknown.
OWN, MEMORY = "the plans themselves", "memory"
MEASURED_BY = {
    "gemm": "meshwright calibrate --data DIR --only gemm",
    "attention": "meshwright calibrate --data DIR --only attention",
    "elementwise": "meshwright calibrate --runs runs.csv",
    "host": "meshwright calibrate --runs runs.csv",
    "network inside nodes": "meshwright calibrate --data DIR --only network",
    "network between nodes": "meshwright calibrate --data DIR --only network",
    OWN: "meshwright calibrate --runs runs.csv",
    MEMORY: "meshwright calibrate --runs runs.csv",
}
WORDS = ERROR_CLASSES | {OWN: "a few steps of each of them", MEMORY: "the peak of memory of one of them"}


class DrawnPlan(NamedTuple):
    """A plan under all draws: its predicted step and its steps in seconds, [draws], and in which of them it fits."""

    step_s: float
    steps_s: np.ndarray
    fits: np.ndarray
    p_fit: float


class PlanStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A plan among the best: the probability that it is the fastest of them that fits, by how much its step is longer
    than the fastest's on average and in the worst draw (shares; of the draws in which it fits), the probability that it
    fits, and whether it cannot be told from the first."""

    best_probability: float
    regret_mean: float
    regret_worst: float
    p_fit: float
    alike: bool


class Decisive(msgspec.Struct, frozen=True, kw_only=True):
    """The unknown whose variance decides between the first plan and its nearest rival: its share of the variance of
    their difference, what to measure, and the command that takes the measurement."""

    unknown: str
    share: float
    measure: str
    command: str


class Sureness(msgspec.Struct, frozen=True, kw_only=True):
    """Certainty of an order: the probability that the first plan is the best of those shown, how many of the others
    cannot be told from it, what would ``decide`` (None where nothing has to be), the share of a predicted gain that was
    realised in measured groups, and over how many draws."""

    best_probability: float
    alike: int
    decides: Decisive | None
    gain_realised: float
    num_draws: int = NUM_DRAWS


class SharedDraws:
    """Plans of one question under the same draws, each simulated and timed when it is first asked for."""

    def __init__(self, evaluator: Evaluator, capacity_bytes: float = float("inf")):
        self.evaluator, self.capacity_bytes = evaluator, capacity_bytes
        framework = evaluator.costs.framework
        self.known = not framework.flagged
        self.memory_sigma = framework.memory_sigma
        self._rng = np.random.default_rng(0)
        self._normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
        self.unknown = {name: self._rng.permutation(self._normal) for name in (*ERROR_CLASSES, MEMORY)}
        self._own: dict[Hashable, np.ndarray] = {}
        self._runs: dict[Plan, Simulated] = {}
        self._drawn: dict[Plan, DrawnPlan] = {}

    def run(self, plan: Plan) -> Simulated:
        """Return the simulated plan."""
        e = self.evaluator
        if plan not in self._runs:
            self._runs[plan] = simulate(plan, e.model, e.cluster, e.train, e.costs)
        return self._runs[plan]

    def of(self, plan: Plan, headroom_bytes: float = float("inf")) -> DrawnPlan:
        """Return the plan under all draws; its fullest rank leaves so many bytes."""
        if plan not in self._drawn:
            run = self.run(plan)
            needed = self.capacity_bytes - headroom_bytes if headroom_bytes < float("inf") else 0.0
            peaks = needed * np.exp(self.memory_sigma * self.unknown[MEMORY])
            p_fit = fit_probability(needed, self.capacity_bytes, self.memory_sigma)
            steps = steps_of(run, self._durations(run))
            self._drawn[plan] = DrawnPlan(run.step_time_s, np.array(steps), peaks <= self.capacity_bytes, p_fit)
        return self._drawn[plan]

    def _durations(self, run: Simulated) -> np.ndarray:
        """Durations [draws, keys] of a plan's programs, seconds."""
        sigma = class_sigma(run)
        factors = np.array([np.exp(sigma[ERROR_CLASS[c]] * self.unknown[ERROR_CLASS[c]]) for c in PRICED])
        own = np.array([self._own_of(program) for program in run.lowered.programs])
        return ((run.priced.parts @ factors) * np.exp(OWN_SIGMA[self.known] * own)).T

    def _own_of(self, program: Program) -> np.ndarray:
        """Return the draws of a program's own error: the mean of those of the passes over layers that it is made of,
        whatever is exchanged beside them, or that of what it exchanges or updates."""
        if not program.layers:
            return self._draw((program.kind, program.moves, program.work))
        layers = Counter((one.which, tuple(entry.work for entry in one.entries)) for one in program.layers)
        return sum(self._draw(key) * count for key, count in layers.items()) / layers.total()

    def _draw(self, key: Hashable) -> np.ndarray:
        if key not in self._own:
            self._own[key] = self._rng.permutation(self._normal)
        return self._own[key]

    def tie(self, a: Plan, first: Plan) -> Tie | None:
        """Return the tie of two plans with the measurement that would break it; None when they can be told apart."""
        mine, best = self.of(a), self.of(first)
        low, high = np.quantile(mine.steps_s - best.steps_s, [0.1, 0.9])
        exact = mine.step_s - best.step_s
        low, high = min(float(low), exact), max(float(high), exact)
        if low > 0 or high < 0:
            return None
        if np.array_equal(mine.steps_s, best.steps_s):
            return Tie(low, high, "nothing: both do the same work")
        return Tie(low, high, self.decides(first, a).measure)

    def decides(self, first: Plan, other: Plan) -> Decisive:
        """Return the unknown that explains most of the difference of two plans over the draws."""
        a, b = self.of(first), self.of(other)
        apart = np.log(b.steps_s) - np.log(a.steps_s)
        total = float(np.var(apart))
        shares = {name: _explained(z, apart, total) for name, z in self.unknown.items() if name != MEMORY}
        shares[OWN] = max(0.0, 1.0 - sum(shares.values()))
        lost = float(np.mean(a.fits != b.fits))
        if lost > 0.25:  # in so many draws one of them does not run at all
            shares[MEMORY] = 1.0
        name = max(shares, key=lambda one: shares[one])
        return Decisive(unknown=name, share=shares[name], measure=WORDS[name], command=MEASURED_BY[name])


def _explained(z: np.ndarray, values: np.ndarray, total: float) -> float:
    """Return the share of the variance of values that follows a normal draw."""
    return float(np.mean(z * (values - values.mean())) ** 2 / np.mean(z**2) / total) if total > 0 else 0.0


def standings(drawn: Sequence[DrawnPlan]) -> tuple[PlanStanding, ...]:
    """Return how every plan stands among the others, the first of which is the one that is predicted fastest. In a draw
    where none fits, all are taken to run."""
    steps = np.array([d.steps_s for d in drawn])
    fits = np.array([d.fits for d in drawn])
    fits |= ~fits.any(axis=0)
    timed = np.where(fits, steps, np.inf)
    least = timed.min(axis=0)
    wins = timed <= least
    share = (wins / wins.sum(axis=0)).mean(axis=1)
    out = []
    for i, one in enumerate(drawn):
        regret = timed[i][fits[i]] / least[fits[i]] - 1
        apart = one.steps_s - drawn[0].steps_s
        out.append(
            PlanStanding(
                best_probability=float(share[i]),
                regret_mean=float(regret.mean()) if regret.size else 0.0,
                regret_worst=float(regret.max()) if regret.size else 0.0,
                p_fit=one.p_fit,
                alike=i == 0 or bool(np.quantile(apart, 0.1) <= 0 <= np.quantile(apart, 0.9)),
            )
        )
    return tuple(out)


def sureness(shared: SharedDraws, plans: Iterable[Plan], found: Sequence[PlanStanding]) -> Sureness | None:
    """Return the certainty of the order of several plans; None where there is one."""
    first, *others = plans
    if not others:
        return None
    rivals = [(s.best_probability, plan) for s, plan in zip(found[1:], others) if s.alike]
    decides = shared.decides(first, max(rivals, key=lambda r: r[0])[1]) if rivals else None
    return Sureness(
        best_probability=found[0].best_probability,
        alike=len(rivals),
        decides=decides,
        gain_realised=REALISED[shared.known],
    )
