"""Tokens to a loss: how many more a sync policy trains on until it is where ``sync=step`` is, with its uncertainty.

Studies of ``catalog/losses`` (``meshwright converge``) say the loss that policies reached at equal tokens, and that of
``sync=step`` at others: read off that curve a loss is a number of tokens, and what a policy takes besides is a factor.
A policy that was measured has the factor it had there. Of others its logarithm is fitted: a sum over how seldom they
meet, how late the result comes and what a code loses, each with a coefficient (least squares with a standard normal
prior on each). The spread is that of policies left out of the fit, one after another: of those that send values whole,
and of those whose codes lose some, which are far worse told. Small models were measured, on few tokens: every factor of
ten of tokens, or of replicas, outside the study adds the former spread once more, which is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import exp, log, log2, log10, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright import catalog
from meshwright.sync.codecs import codec
from meshwright.sync.losses import TrainedLoss
from meshwright.sync.policy import read
from meshwright.sync.record import ADDED, ALL, USUAL, SyncPolicy

if TYPE_CHECKING:
    import numpy as np

#: Of an 80% interval of a normal distribution: standard deviations to each side.
EIGHTY = 1.2816
#: Values that the error of a code is measured on, and draws of a code that draws.
SAMPLE, DRAWS = 4096, 4
#: A code that loses less of the square sends values whole, for what follows.
WHOLE = 0.01
#: What a code may lose at most of a value's square, as it is counted.
MOST_LOST = 1 - 1e-4
#: The names of the columns of :func:`features`.
COLUMNS = ("steps of a round", "steps of a round, outer step", "delay", "code", "code with feedback", "round by tokens")


class TokensFactor(msgspec.Struct, frozen=True, kw_only=True):
    """How many times the tokens of ``sync=step`` a policy takes to its loss, with an 80% interval. ``basis``: "exact"
    where it trains as one process does, "measured" or "fitted" by a ``study``; ``outside``: what of the question lies
    outside of that."""

    value: float
    low: float
    high: float
    basis: str
    study: str = ""
    outside: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Studied(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a study after so many steps: held-out losses by seed, None where a run diverged, and bytes that a
    rank sends for a token."""

    policy: str
    steps: int
    losses: tuple[float | None, ...]
    sent: float


class LossStudy(msgspec.Struct, frozen=True, kw_only=True):
    """A study of the catalog: ``text`` and its ``licence``, what was trained, and every run."""

    title: str
    source: str
    text: str
    licence: str
    model: str
    train: str
    tokens_per_step: int
    replicas: int
    lr: float
    runs: tuple[Studied, ...]

    def rows(self) -> list[TrainedLoss]:
        """Every run."""
        return [
            TrainedLoss(
                policy=one.policy,
                seed=seed,
                steps=one.steps,
                tokens=one.steps * self.tokens_per_step,
                loss=float("inf") if loss is None else loss,
                sent_per_token=one.sent,
            )
            for one in self.runs
            for seed, loss in enumerate(one.losses)
        ]


class FactorPoint(NamedTuple):
    """A policy after so many tokens: the logarithm of its factor, the mean over seeds, and that mean's standard
    error."""

    policy: str
    tokens: float
    log_factor: float
    error: float


class FactorFit(NamedTuple):
    """Coefficients of :data:`COLUMNS`, their covariance over the variance of a policy, and the spread of policies that
    send values whole, and of others: the root of the mean square of what was left out."""

    coefficients: np.ndarray
    covariance: np.ndarray
    whole: float
    lossy: float


class LossModel(NamedTuple):
    """A study read as factors: those measured, and the fit."""

    name: str
    study: LossStudy
    points: tuple[FactorPoint, ...]
    fit: FactorFit
    left_out: dict[str, float]

    @property
    def most_tokens(self) -> float:
        """Tokens of the longest runs that policies were compared after."""
        return max(point.tokens for point in self.points)

    @property
    def fewest_rounds(self) -> float:
        """Rounds of the run of fewest, among those whose replicas do not meet in every step; 1 without such a run."""
        whens = ((point.tokens, read(point.policy).when) for point in self.points)
        return min((tokens / self.study.tokens_per_step / when for tokens, when in whens if when > 1), default=1.0)


@cache
def model() -> LossModel:
    """The loss model that answers go by: that of the catalog's study."""
    (name, entry), *_ = catalog.tables("losses").items()
    return modelled(name, msgspec.convert(entry, LossStudy))


def modelled(name: str, study: LossStudy) -> LossModel:
    """The factors of a study, the fit through them and what each policy is off by when it is left out."""
    found = points(study.rows())
    fitted = [point for point in found if features(read(point.policy), point.tokens, found) is not None]
    left_out = {}
    for policy in dict.fromkeys(point.policy for point in fitted):
        coefficients, _ = solved([p for p in fitted if p.policy != policy], found)
        last = max((p for p in fitted if p.policy == policy), key=lambda p: p.tokens)
        left_out[policy] = float(features(read(policy), last.tokens, found) @ coefficients) - last.log_factor
    whole, lossy = (
        sqrt(fmean([e**2 for p, e in left_out.items() if loses(read(p)) == kind] or [1.0])) for kind in (False, True)
    )
    return LossModel(name, study, tuple(found), FactorFit(*solved(fitted, found), whole, lossy), left_out)


def points(rows: Iterable[TrainedLoss]) -> list[FactorPoint]:
    """The factors of runs against the curve of ``sync=step`` with the same seed; runs that diverged have none, nor
    those with a learning rate of their own, whose words stay."""
    by: dict[int, dict[str, dict[float, float]]] = {}
    for row in rows:
        by.setdefault(row.seed, {}).setdefault(row.policy, {})[row.tokens] = row.loss
    found: dict[tuple[str, float], list[float]] = {}
    for policies in by.values():
        curve = sorted(policies.get(USUAL, {}).items())
        for policy, losses in policies.items():
            for tokens, loss in losses.items():
                if policy != USUAL and len(curve) > 1 and loss < float("inf"):
                    found.setdefault((policy, tokens), []).append(log(tokens) - log_tokens(loss, curve))
    out = []
    for (policy, tokens), logs in found.items():
        mean = fmean(logs)
        variance = sum((one - mean) ** 2 for one in logs) / max(1, len(logs) - 1)
        out.append(FactorPoint(policy.partition("@")[0], tokens, mean, sqrt(variance / len(logs))))
    return out


def log_tokens(loss: float, curve: Sequence[tuple[float, float]]) -> float:
    """The logarithm of the tokens after which a curve of (tokens, loss) is at a loss: straight between its points in
    the logarithm of tokens, and beyond them as between the last two."""
    ends = list(pairwise(curve))
    (t0, l0), (t1, l1) = next(((a, b) for a, b in ends if b[1] <= loss), ends[-1])
    slope = (l1 - l0) / (log(t1) - log(t0))
    return log(t0) + (loss - l0) / slope if slope < 0 else log(t0)


def features(policy: SyncPolicy, tokens: float, known: Iterable[FactorPoint]) -> np.ndarray | None:
    """The columns of a policy after so many tokens, [6]; None where the study tells nothing of its kind: another rule,
    other groups or combines, or updates of an optimizer."""
    import numpy as np

    rules = {read(point.policy).rule.name for point in known} | {USUAL}
    told = policy.rule.name in rules and policy.group == ALL and policy.combine in ADDED and not policy.rule.optimizer
    if not told:
        return None
    seldom, lost = log2(policy.when), lost_by(policy.codec)
    most = max(point.tokens for point in known)
    feedback = codec(policy.codec).feedback
    return np.array(
        [
            seldom if policy.outer.taken else 0.0,
            0.0 if policy.outer.taken else seldom,
            policy.delay / policy.when,
            0.0 if feedback else log2(1 + lost),
            -log2(1 - min(lost, MOST_LOST)) if feedback else 0.0,
            seldom * log2(min(tokens, most) / most),
        ]
    )


def loses(policy: SyncPolicy) -> bool:
    """Whether a policy's code loses more than its digits."""
    return lost_by(policy.codec) > WHOLE


@lru_cache(maxsize=256)
def lost_by(text: str) -> float:
    """The share of the square of normally distributed values that a code loses in one message."""
    import numpy as np

    found, x = codec(text), np.random.default_rng(0).standard_normal(SAMPLE).astype(np.float32)
    if found.exact:
        return 0.0
    lost = 0.0
    for seed in range(DRAWS if found.drawn else 1):
        back = found.decoded(found.encoded(x, seed), SAMPLE, x.dtype, seed)
        lost += float(((x - back) ** 2).sum() / (x**2).sum())
    return lost / (DRAWS if found.drawn else 1)


def solved(some: Sequence[FactorPoint], known: Sequence[FactorPoint]) -> tuple[np.ndarray, np.ndarray]:
    """Least squares with a standard normal prior on each coefficient: them, and the inverse of the normal matrix."""
    import numpy as np

    rows = np.array([features(read(point.policy), point.tokens, known) for point in some]).reshape(-1, len(COLUMNS))
    inverse = np.linalg.inv(rows.T @ rows + np.eye(len(COLUMNS)))
    return inverse @ rows.T @ np.array([point.log_factor for point in some]), inverse


def tokens_factor(
    policy: SyncPolicy, tokens: float, replicas: int, known: LossModel | None = None
) -> TokensFactor | None:
    """How many times the tokens of ``sync=step`` a policy takes to the loss that this has after so many, on so many
    replicas, by a study that is ``known`` (else that of the catalog); None where it tells nothing of its kind."""
    if policy.exact or replicas < 2:
        return TokensFactor(value=1.0, low=1.0, high=1.0, basis="exact")
    known = known or model()
    beyond = decades_beyond(known, tokens, replicas)
    far = sum(beyond.values()) * known.fit.whole
    measured = [point for point in known.points if point.policy == policy.text]
    columns = features(policy, tokens, known.points)
    if measured:
        last = max(measured, key=lambda point: point.tokens)
        middle, spread, basis = last.log_factor, sqrt(last.error**2 + far**2), "measured"
    elif columns is not None:
        middle = float(columns @ known.fit.coefficients)
        spread = known.fit.lossy if loses(policy) else known.fit.whole
        own = spread**2 * (1 + float(columns @ known.fit.covariance @ columns))
        spread, basis = sqrt(own + far**2), "fitted"
    else:
        return None
    outside = tuple(what for what, many in beyond.items() if many > 0)
    low, high = (exp(middle + side * EIGHTY * spread) for side in (-1, 1))
    return TokensFactor(value=exp(middle), low=low, high=high, basis=basis, study=known.name, outside=outside)


def decades_beyond(known: LossModel, tokens: float, replicas: int) -> Mapping[str, float]:
    """Factors of ten by which tokens and replicas are outside of a study."""
    first = min(point.tokens for point in known.points)
    return {
        "tokens": max(0.0, log10(tokens / known.most_tokens), log10(first / tokens)) if tokens else 0.0,
        "replicas": abs(log10(replicas / known.study.replicas)),
    }
