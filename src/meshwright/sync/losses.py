"""Losses that sync policies, ways of feedback, or other workloads reached at equal tokens: one row a run, and each
beside the policy of every step."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from statistics import fmean, stdev

import msgspec

from meshwright.spec.workload import Train, parse
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL

#: How words begin that say what layers learn from, or what else the workload says, in place of a sync policy.
FEEDBACK, WORKLOAD = "feedback=", "train="


class TrainedLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its ``policy`` as words of a plan (without ``sync=``), seed and steps, the tokens it trained on, and its
    mean loss a token on text that it did not train on, in nats (infinite where it diverged). ``sent_per_token``: bytes
    that a rank sends for a token that it trains, if collectives go around rings. Of labelled samples all of these are a
    sample's, and ``accuracy`` is the share of those held out that are classified rightly; None of text and values."""

    policy: str
    seed: int
    steps: int
    tokens: float
    loss: float
    sent_per_token: float
    accuracy: float | None = None


def rated(policy: str) -> tuple[str, float | None]:
    """A policy's words without the learning rate behind them, and that rate."""
    words, _, rate = policy.partition("@")
    return words, float(rate) if rate else None


def sync_of(policy: str) -> str:
    """The sync policy of a run: its words, or that of every step where they say something else."""
    words = rated(policy)[0]
    return USUAL if words.startswith((FEEDBACK, WORKLOAD)) else words


def words_of(policy: str) -> str:
    """The words of a plan that a policy is."""
    words = rated(policy)[0]
    return words if words.startswith(FEEDBACK) else f"sync={sync_of(policy)}"


def workload(train: Train, policy: str) -> Train:
    """The workload with the optimizer that a policy is of, where it is of one, and with what its words say of it.

    Raises:
        MeshwrightError: W codes for words that are none of a workload.
    """
    words = rated(policy)[0]
    if words.startswith(WORKLOAD):
        said = dict(word.partition("=")[::2] for word in train.text().split(","))
        said |= dict(word.partition("=")[::2] for word in words.removeprefix(WORKLOAD).split(","))
        return parse(",".join(f"{key}={value}" for key, value in said.items()))
    optimizer = read(sync_of(policy)).rule.optimizer
    return msgspec.structs.replace(train, optimizer=optimizer) if optimizer else train


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A policy after so many steps: ``mean`` and ``spread`` (standard deviation, 0 of one run) of its losses over
    ``seeds`` runs, those of the differences to the usual policy with equal seeds (None where it has no such run), and
    ``diverged`` runs, which the others' mean leaves out; of labelled samples the same of accuracies (``right``)."""

    policy: str
    steps: int
    tokens: float
    seeds: int
    mean: float
    spread: float
    apart: float | None
    apart_spread: float
    sent_per_token: float
    diverged: int = 0
    right: float | None = None
    right_spread: float = 0.0
    right_apart: float | None = None
    right_apart_spread: float = 0.0

    @property
    def said(self) -> str:
        """The difference to the usual policy, and whether it is more than twice its standard error."""
        return self._verdict(self.apart, self.apart_spread, self.seeds)

    @property
    def right_said(self) -> str:
        """The same of accuracies."""
        apart = None if self.right_apart is None else -self.right_apart
        return self._verdict(apart, self.right_apart_spread, self.seeds)

    def _verdict(self, apart: float | None, spread: float, runs: int) -> str:
        if apart is None or self.policy == USUAL:
            return ""
        if runs < 2 or abs(apart) <= 2 * spread / runs**0.5:
            return "no difference seen"
        return "worse" if apart > 0 else "better"


def compared(rows: Iterable[TrainedLoss]) -> tuple[PolicyLoss, ...]:
    """Policies of equal steps beside one another: by steps, then by loss."""
    by: dict[tuple[int, str], dict[int, TrainedLoss]] = {}
    for row in rows:
        by.setdefault((row.steps, row.policy), {})[row.seed] = row
    out = [_one(found, by.get((steps, USUAL), {})) for (steps, _), found in by.items()]
    return tuple(sorted(out, key=lambda one: (one.steps, not isfinite(one.mean), one.mean, one.policy)))


def _one(found: dict[int, TrainedLoss], usual: dict[int, TrainedLoss]) -> PolicyLoss:
    ended = {seed: row.loss for seed, row in found.items() if isfinite(row.loss)}
    apart = [loss - usual[seed].loss for seed, loss in ended.items() if seed in usual and isfinite(usual[seed].loss)]
    one = next(iter(found.values()))
    right = {seed: row.accuracy for seed, row in found.items() if row.accuracy is not None}
    beyond = [share - usual[seed].accuracy for seed, share in right.items() if _judged(usual.get(seed))]
    return PolicyLoss(
        policy=one.policy,
        steps=one.steps,
        tokens=one.tokens,
        seeds=len(ended),
        mean=fmean(ended.values()) if ended else float("inf"),
        spread=_spread(list(ended.values())),
        apart=fmean(apart) if apart else None,
        apart_spread=_spread(apart),
        sent_per_token=fmean(row.sent_per_token for row in found.values()),
        diverged=len(found) - len(ended),
        right=fmean(right.values()) if right else None,
        right_spread=_spread(list(right.values())),
        right_apart=fmean(beyond) if beyond else None,
        right_apart_spread=_spread(beyond),
    )


def _judged(row: TrainedLoss | None) -> bool:
    return row is not None and row.accuracy is not None


def _spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
