"""Time to a loss: the best plan of every sync policy, and how long each takes to the loss of ``sync=step``.

A step of a policy may be shorter and take it less far. Every policy is searched for its fastest plan, whose step time
times the steps it needs (:mod:`meshwright.sync.tokens`) is what policies are compared by. A policy
that cannot come before the best so far, at its factor, is given up as soon as its bounds say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import exp, inf, log, sqrt

import msgspec

from meshwright.answer.to_loss import TOKENS_PER_PARAMETER
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.search.find import find
from meshwright.search.found import Found
from meshwright.search.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.losses import workload
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL
from meshwright.sync.tokens import LossModel, TokensFactor, model, tokens_factor

FORMAT_VERSION = 1
#: Plans of each policy that are tried under the next.
KEPT = 3
#: Rounds besides those of the study: those of DiLoCo's paper, and a fifth.
ROUNDS = ("local:h=100", "local:h=500", "diloco:h=100", "diloco:h=500")


class PolicyTime(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of a policy: its step time, the factor of tokens it takes to the loss that is asked for, and the
    seconds until then with their 80% interval."""

    policy: str
    plan: Plan
    step_time_s: float
    factor: TokensFactor
    seconds: float
    low: float
    high: float


class LossTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Policies by their time to the loss that ``sync=step`` has after ``tokens``, the soonest first. ``slower`` were
    given up because they come behind the first of them, ``unknown`` are (policy, why nothing can be told); ``found`` is
    the search of the first's plan, and ``assumed`` says whether the number of tokens was."""

    question: tuple[str, str, str]
    tokens: float
    assumed: bool
    policies: tuple[PolicyTime, ...]
    slower: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    study: str
    found: Found | None = None
    stopped: bool = False

    @property
    def best(self) -> PolicyTime | None:
        return self.policies[0] if self.policies else None

    def to_json(self) -> dict:
        """The answer as plain values."""
        return {
            "format_version": FORMAT_VERSION,
            "model": self.question[0],
            "cluster": self.question[1],
            "workload": self.question[2],
            "tokens": self.tokens,
            "tokens_assumed": self.assumed,
            "study": self.study,
            "policies": [
                {
                    "policy": one.policy,
                    "plan": one.plan.text(),
                    "step_time_s": one.step_time_s,
                    "tokens_factor": msgspec.to_builtins(one.factor),
                    "seconds": one.seconds,
                    "interval_s": [one.low, one.high],
                }
                for one in self.policies
            ],
            "slower": list(self.slower),
            "unknown": [{"policy": policy, "why": why} for policy, why in self.unknown],
            "stopped": self.stopped,
        }


def usual_policies(known: LossModel) -> tuple[str, ...]:
    """The policies that are compared where nobody names some: those of the study, and longer rounds."""
    measured = dict.fromkeys(point.policy for point in known.points)
    return tuple(dict.fromkeys((USUAL, *measured, *ROUNDS)))


def find_to_loss(
    model_of: Model,
    cluster: Cluster,
    train: Train,
    space: Space,
    policies: Iterable[str],
    *,
    known: LossModel | None = None,
    searched: Callable[..., Found] = find,
    said: Callable[[str], None] | None = None,
    **settings: object,
) -> LossTimes:
    """The policies by their time to a loss, each with its fastest plan of the `space`; `settings` are those of
    :func:`~meshwright.search.find.find`, and `said` is told each policy before it is searched. Factors of tokens are by
    the study that is `known`, else by that of the catalog. Ctrl-C ends it with the policies that were done."""
    tokens = train.tokens or TOKENS_PER_PARAMETER * model_of.num_params
    study = known or model()
    factors, unknown = _factors(policies, tokens, cluster, train, study)
    found: dict[str, tuple[PolicyTime, Found]] = {}
    slower, stopped, soonest = [], False, inf
    plans: dict[Plan, None] = {}
    kernels: dict = {}
    for policy, factor in sorted(factors.items(), key=lambda item: item[0] != USUAL):  # what others are compared with
        if said is not None:
            said(policy)
        steps, alone = factor.value * tokens / train.tokens_per_step, space.with_domain("sync", (policy,))
        # what is best under one policy is often good under another
        first = [msgspec.structs.replace(p, sync=msgspec.structs.replace(p.sync, policy=policy)) for p in plans]
        hints = {"top": KEPT, "kernels": kernels, "first": first, "cap_s": soonest / steps}
        if policy == USUAL:  # what is gained is told against a plan that is proven
            hints["strategy"] = "exhaustive"
        try:
            answer = searched(model_of, cluster, train, space=alone, **settings | hints)
        except MeshwrightError as error:
            unknown[policy] = error.diagnostics[0].message
            continue
        if answer.best:
            one = _timed(policy, tokens, answer, steps, study)
            found[policy] = one, answer
            plans |= dict.fromkeys(ranked.plan for ranked in answer.best)
            soonest = min(soonest, one.seconds)
        elif not answer.stopped:
            slower.append(policy)
        if answer.stopped:
            stopped = True
            break
    ordered = sorted(found.values(), key=lambda pair: pair[0].seconds)
    return LossTimes(
        question=(model_of.name, cluster.name, train.text()),
        tokens=tokens,
        assumed=not train.tokens,
        policies=tuple(one for one, _ in ordered),
        slower=tuple(slower),
        unknown=tuple(unknown.items()),
        study=study.name,
        found=ordered[0][1] if ordered else None,
        stopped=stopped,
    )


def _factors(
    policies: Iterable[str], tokens: float, cluster: Cluster, train: Train, study: LossModel
) -> tuple[dict[str, TokensFactor], dict[str, str]]:
    """The factors of policies, and why others have none: rounds that are fewer than in any run of the study among
    them. How many replicas there are widens their intervals alone."""
    known, unknown = {}, {}
    for words in dict.fromkeys(policies):
        policy = read(words)
        if workload(train, words) != train:
            unknown[words] = f"it is of optimizer={policy.rule.optimizer}, which the workload does not say"
            continue
        factor = tokens_factor(policy, tokens, cluster.num_devices, study)
        rounds = factor.value * tokens / train.tokens_per_step / policy.when if factor is not None else 0.0
        if factor is None:
            unknown[words] = "no study has a policy of its kind: meshwright converge trains one"
        elif policy.when > 1 and rounds < study.fewest_rounds:
            least = f"the study's runs have {study.fewest_rounds:.3g} and more"
            unknown[words] = f"it is {rounds:.2g} rounds of {policy.when} steps to that loss, and {least}"
        else:
            known[words] = factor
    return known, unknown


def _timed(policy: str, tokens: float, answer: Found, steps: float, study: LossModel) -> PolicyTime:
    """The time to the loss of a policy's best plan; errors of steps and of tokens are independent."""
    best = answer.best[0]
    factor = tokens_factor(read(policy), tokens, max(2, best.plan.layout.dp * best.plan.layout.cp), study)
    step = best.prediction.metrics.step_time_s
    low, high = step.interval or (step.value, step.value)
    seconds, value = step.value * steps, factor.value
    below = sqrt(log(step.value / low) ** 2 + log(value / factor.low) ** 2)
    above = sqrt(log(high / step.value) ** 2 + log(factor.high / value) ** 2)
    return PolicyTime(
        policy=policy,
        plan=best.plan,
        step_time_s=step.value,
        factor=factor,
        seconds=seconds,
        low=seconds * exp(-below),
        high=seconds * exp(above),
    )
