"""Cautions of plans that train otherwise than one process does: how, and what replicas have in common."""

from __future__ import annotations

from meshwright.answer.prediction import RoundTimes
from meshwright.plan import Plan
from meshwright.plan.facets.offload import DELAYED
from meshwright.quantity import seconds
from meshwright.spec import naming
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.groups import graph, most_heard, spectral_gap
from meshwright.sync.options import runs
from meshwright.sync.policy import read
from meshwright.sync.record import SyncPolicy
from meshwright.sync.rounds import turns_of

#: Replicas up to which the spectral gap of a graph is worked out for an answer: a tenth of a second at most.
MOST_MIXED = 256


def approximate(plan: Plan, model: Model, train: Train, rounds: RoundTimes | None) -> tuple[str, ...]:
    """A caution where replicas are kept together in a way that trains differently."""
    if plan.several:  # pools step together, and exchange values as they are
        return ()
    policy = read(plan.sync.policy)
    if plan.offload.update == DELAYED:
        return (
            "update=delayed is approximate: the host updates beside the next step, whose gradients are of parameters "
            "one update older",
        )
    if policy.taught is not None:
        return (_taught(plan, policy),)
    if policy.meets:
        return (_mixed(plan, policy, rounds),)
    if policy.paths is not None:
        return (_routed(plan, model, policy, rounds),)
    if policy.rule.forwards:
        return (
            f"sync={plan.sync.policy} is approximate: a step goes by the slope along one direction for every replica, "
            "of as many as there are parameters",
        )
    if policy.copies > 1:
        return (
            f"sync={plan.sync.policy} has {policy.copies} clients compute each part of a batch: a step's gradient is "
            f"whole while {policy.copies - 1} are missing, and that of one process but for the order of sums",
        )
    if policy.reference:
        return (
            f"sync={plan.sync.policy} is approximate: a step goes by the gradient half-way, of which replicas send in "
            f"{policy.codec} what it differs from that at a reference; in {_often(policy.reference)} the "
            "reference moves, by a pass more whose gradients travel as they are. The step time is the mean",
        )
    if rounds is None and not policy.coded and not policy.exact:
        return (
            f"sync={plan.sync.policy} is approximate: the {policy.combine} of what replicas bring is not their sum",
        )
    if policy.rule.optimizer and rounds is None:
        return (
            f"sync={plan.sync.policy} is approximate: every replica makes updates of its own gradients, and all apply "
            f"what becomes of these in {policy.codec}",
        )
    if policy.merged is not None:
        return (_merged(plan, policy),)
    if policy.pruning is not None:
        kept = f"{policy.pruning.first:.0%} and in the end {policy.pruning.last:.0%} of matrices are left out"
        return (f"sync={plan.sync.policy} is approximate: of the model that clients get {kept}",)
    if policy.rule.vectors_apart:
        what = (
            f"weights of {policy['weights']} bits are computed with, and gradients of {policy['grads']} bits are summed"
        )
        return (f"sync={plan.sync.policy} is approximate: {what}, right in the mean",)
    if rounds is None and policy.coded:
        lost = "what the code loses is added to the next ones" if codec(policy.codec).feedback else "digits are lost"
        if codec(policy.codec).varies:
            lost += "; how many bytes travel is known once they are encoded, and counted as those of normal numbers"
        some = "gradients" if policy.layers is None else f"gradients of layers {runs(policy.layers)}"
        return (f"sync={plan.sync.policy} is approximate: {some} travel in {policy.codec}, and {lost}",)
    if rounds is None or policy.exact:
        return ()
    return (
        f"sync={plan.sync.policy} is approximate: replicas step apart and their losses are not those of one process. "
        + _told(rounds)
        + ("" if train.lengths is None else ", and all microbatches are taken to hold documents of mean length"),
    )


def _often(every: int) -> str:
    return "every step" if every == 1 else f"one of {every} steps, by chance,"


def _mixed(plan: Plan, policy: SyncPolicy, rounds: RoundTimes | None) -> str:
    """Say that replicas mix their parameters with those of some others, and how soon they agree."""
    replicas, known = num_replicas(plan, policy), ""
    if policy.clocks is not None:
        often = 2 * policy.clocks.rate(replicas) / replicas
        said = (
            f"sync={plan.sync.policy} is approximate: replicas step and meet by clocks of their own, each {often:.3g} "
            "times for each gradient step in the mean, one other at a time; losses are not those of one process"
        )
        if rounds is None:
            return said
        inner, meets = seconds(rounds.inner_s), seconds(rounds.averaging_s - rounds.inner_s)
        return f"{said}. A step takes {inner}, and its meetings {meets} with what they wait for; nobody waits for all"
    if policy.priced:
        met = most_heard(policy.group, replicas)
        also = ", moved by noise: they sample, and do not settle" if policy.mix.noise else ""
        said = (
            f"sync={plan.sync.policy} is approximate: replicas step apart on their own losses and prices of differing "
            f"from the {met} that each meets, pulled to the middle between them{also}; losses are not those of one "
            "process"
        )
        return said if rounds is None else f"{said}. {_told(rounds)}"
    if replicas <= MOST_MIXED:
        gap = spectral_gap(graph(policy.group, replicas))
        agreed = f"all agree after {turns_of(policy, replicas)} of them"
        known = f" ({agreed if gap == 1 else f'one leaves {1 - gap:.2g} of their distance from the mean'})"
    said = (
        f"sync={plan.sync.policy} is approximate: replicas step apart, and in each exchange mix their parameters with "
        f"those of the replicas that they meet{known}; losses are not those of one process"
    )
    return said if rounds is None else f"{said}. {_told(rounds)}"


def _taught(plan: Plan, policy: SyncPolicy) -> str:
    """Say that there are as many models as replicas, and what they learn of each other."""
    taught, replicas = policy.taught, num_replicas(plan, policy)
    met = most_heard(policy.group, replicas)
    sent = f"the {taught.top} likeliest tokens" if taught.top else "all tokens"
    return (
        f"sync={plan.sync.policy} is approximate: it trains {replicas} models, each on text of its own, whose "
        f"{taught.heads} further heads learn what those of the {met} that each meets predict of public text, in "
        f"probabilities of {sent}; no parameters are exchanged"
    )


def _merged(plan: Plan, policy: SyncPolicy) -> str:
    """Say which tasks clients learn, and what is not known of their groups."""
    merged = policy.merged
    return (
        f"sync={plan.sync.policy} is approximate: clients train apart on tasks of one trunk, of tokens 1 to "
        f"{merged.tasks} ahead; which of them share one of {merged.groups} jobs later is measured in a run, and here "
        "they are split evenly"
    )


def _routed(plan: Plan, model: Model, policy: SyncPolicy, rounds: RoundTimes | None) -> str:
    """Say that there are several models, in whole or part, and who learns what."""
    replicas = num_replicas(plan, policy)
    count = policy.paths.count(replicas)
    shared = "which share modules" if rounds is not None else "which exchange nothing"
    alike = f"sequences whose first {policy.paths.prefix} tokens are like each other"
    if naming.labelled(model):
        alike = "one cluster of the samples, so that a step of each is one of its own share of the batch"
    said = f"sync={plan.sync.policy} is approximate: it trains {count} models, {shared}, each on {alike}"
    return said if rounds is None else f"{said}. {_told(rounds)}"


def num_replicas(plan: Plan, policy: SyncPolicy) -> int:
    """Sets of ranks that take the same step."""
    return plan.layout.dp * plan.layout.cp // policy.rule.together(plan)


def _told(rounds: RoundTimes) -> str:
    """The steps of a round in words."""
    inner, averaging, every = seconds(rounds.inner_s), seconds(rounds.averaging_s), f"{rounds.every:.4g}"
    if rounds.parts == 1 and not rounds.delay:
        return f"A step takes {inner}, one of {every}, which averages, {averaging}; the step time is their mean"
    which = f"{rounds.parts} of {every}, which exchange a part each" if rounds.parts > 1 else f"one of {every}"
    if rounds.turns:
        which = f"{rounds.turns} of {every}, in which others are met each time" if rounds.turns > 1 else which
    told = (
        f"A step takes {inner}, {which}, {averaging} with what it makes others take longer; the step time is the mean"
    )
    if not rounds.delay:
        return told
    late = f"{seconds(rounds.waits_s)} a round are waited for" if rounds.waits_s else "nothing is waited for"
    told += f". What arrives is applied {rounds.delay} steps late, and {late}"
    return f"{told}: {rounds.hidden_gbit_s:.3g} Gbit/s of a rank hide it"
