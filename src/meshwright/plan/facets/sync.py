"""Sync: how replicas are kept together, by a rule of ``sync/rules`` with its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import EXCHANGE, KEYED, STRUCTURE, Facet, Field, Form
from meshwright.spec import naming
from meshwright.spec.workload import LAYERWISE, OVER_BATCHES
from meshwright.sync import policy, rounds
from meshwright.sync.merged import unmerged
from meshwright.sync.paths import HIDDEN
from meshwright.sync.record import USUAL
from meshwright.sync.taught import unteachable

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas are kept together: ``step`` (gradients are exchanged in every step), or a rule with its options as
    ``local:h=8`` (parameters are averaged once in 8)."""

    policy: str = USUAL


def _wrong(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    said = policy.read(plan.sync.policy)
    if said.rule.wrong is not None:
        yield from said.rule.wrong(plan, cluster, said)
    wanted = said.rule.optimizer
    if wanted and train.optimizer != wanted:
        yield Diagnostic(
            code="Y003",
            message=f"sync={said.rule.name} exchanges updates of {wanted}, and the workload trains with "
            f"{train.optimizer}",
            place=f"plan.sync.policy = {said.text}",
            help=f"say optimizer={wanted} in the workload, or drop sync",
        )
    if said.reference and (train.grow or train.align or train.clusters):
        yield Diagnostic(
            code="Y003",
            message="a step's gradient is that of a point half-way, and the workload goes by those of its parameters",
            place=f"plan.sync.policy = {said.text}",
            help="drop grow, align and clusters from the workload, or drop sync",
        )
    if (said.priced or said.clocks is not None) and (train.grow or train.align or train.clusters):
        what = "is pulled towards neighbours" if said.priced else "moves momenta and duals by one learning rate"
        yield Diagnostic(
            code="Y003",
            message=f"a step {what}, and the workload's batch, rates or momenta follow the gradient alone",
            place=f"plan.sync.policy = {said.text}",
            help="drop grow, align and clusters from the workload, or drop sync",
        )
    if said.own_data and (train.clusters or train.packing in OVER_BATCHES):
        taken = f"clusters={train.clusters}" if train.clusters else f"pack={train.packing}"
        yield Diagnostic(
            code="Y003",
            message=f"every replica has a run of the text of its own, and {taken} divides the text otherwise",
            place=f"plan.sync.policy = {said.text}",
            help=f"drop {taken} from the workload, or say sync=local:h={said.when}",
        )
    if said.early and (train.optimizer in LAYERWISE or train.align):
        yield Diagnostic(
            code="Y003",
            message="layers are updated within the backward, before the norms that others wait for are known",
            place=f"plan.sync.policy = {said.text}",
            help="say start=update, or another optimizer",
        )
    if said.own_heads and model.tied_embeddings:
        message = f"the head of {model.name} is its embedding's table, which replicas share, and heads=own parts them"
        help = "say heads=fused, or a model whose head is a table of its own"
        yield Diagnostic(code="Y003", message=message, place=f"plan.sync.policy = {said.text}", help=help)
    if said.paths is not None:
        yield from _unrouted(said, model, train)
    for at, why, help in unteachable(plan, model, train, said.taught) if said.taught is not None else ():
        message = f"sync={said.rule.name} has heads learn what neighbours predict of public text: {why}"
        yield Diagnostic(code="Y003", message=message, place=f"plan.{at}", help=f"{help}, or another sync")
    for why, help in unmerged(model, train, said.merged) if said.merged is not None else ():
        message = f"sync={said.rule.name} has a head for each task, on tokens further and further ahead: {why}"
        yield Diagnostic(code="Y003", message=message, place=f"plan.sync.policy = {said.text}", help=help)
    yield from rounds.impossible(plan, model, said)


def _unrouted(said: policy.SyncPolicy, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Workloads whose sequences are not routed to paths by their first tokens, nor samples by their features."""
    place, prefix, samples = f"plan.sync.policy = {said.text}", said.paths.prefix, naming.labelled(model)
    if samples and "prefix=" in said.text:
        message = f"prefix={prefix}: the samples of {model.name} are routed by features, and have no first tokens"
        yield Diagnostic(code="Y003", message=message, place=place, help="drop prefix=")
    if not samples and said.paths.features != HIDDEN:
        message = f"features={said.paths.features}: {model.name} reads text, which is routed by its first tokens"
        yield Diagnostic(code="Y003", message=message, place=place, help="drop features=")
    if prefix >= train.seq_len and not samples:
        message = f"sequences are routed by their first {prefix} tokens, and have {train.seq_len}: nothing is learnt"
        help = f"say prefix={max(1, train.seq_len // 2)}, or longer sequences"
        yield Diagnostic(code="Y003", message=message, place=place, help=help)
    packed = "" if train.packing == "concat" else train.packing
    words = {"pack": packed, "clusters": train.clusters, "grow": train.grow}
    for word, value in words.items():
        if value:
            message = f"every path has the sequences that are routed to it, and {word}={value} lays them out otherwise"
            yield Diagnostic(code="Y003", message=message, place=place, help=f"drop {word}= from the workload, or sync")


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    said = policy.read(plan.sync.policy)
    if said.undecided:
        yield Diagnostic(
            code="P033",
            message=f"sync={said.text} leaves open {said.rule.opens[0]}, and a run has no timeline to choose by",
            place=f"plan.sync.policy = {said.text}",
            help="meshwright predict with this plan chooses: say the words it prints, with one such as "
            f"{said.rule.opens[1]}",
        )
    if said.helpers and model.mixtures:
        yield Diagnostic(
            code="P033",
            message=f"aux={said.helpers} of {model.name} is priced and not run: experts are chosen over all "
            "replicas, and peers that only sum make none",
            place=f"plan.sync.policy = {said.text}",
            help="a dense model, or drop aux",
        )
    if said.hosted:
        yield Diagnostic(
            code="P033",
            message=f"sync={said.text} is priced and not run: its sums are a library's of devices and their hosts",
            place=f"plan.sync.policy = {said.text}",
            help="drop sync: a run sums by its backend, to the same result",
        )
    if said.paths is not None:
        yield from _unrouting(plan, model, train, said)


def _unrouting(plan: Plan, model: Model, train: Train, said: policy.SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts and models of which a run does not see the hidden states of a prefix on one rank."""
    layout, found = plan.layout, []
    found += [(f"layout.pp = {layout.pp}", "stages are on several ranks", "take pp1")] if layout.pp > 1 else []
    found += [(f"layout.cp = {layout.cp}", "ranks share a sequence", "take cp1")] if layout.cp > 1 else []
    if layout.sp and said.paths.prefix % layout.tp and not naming.labelled(model):
        found.append(
            (f"layout.sp, tp = {layout.tp}", f"it does not divide the prefix of {said.paths.prefix}", "drop sp")
        )
    if len(model.flows) > 1 or not (train.causal or naming.labelled(model)):
        found.append((f"model {model.name}", "its text is not one stream from left to right", "take a language model"))
    for at, why, help in found:
        what = (
            "samples by features" if naming.labelled(model) else "sequences by the hidden states of their first tokens"
        )
        message = f"sync={said.rule.name} routes {what}, and {why}"
        yield Diagnostic(code="P033", message=message, place=f"plan.{at}", help=help)


FIELDS = (
    Field(
        name="sync",
        attribute="policy",
        help="how replicas are kept together",
        form=Form(
            read=lambda text: policy.read(text).text,
            wanted="a rule such as step or local:h=8",
            whole=True,
        ),
        spelled=KEYED,
        place=300,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: lambda plan: plan.sync.policy},
    ),
)
FACET = Facet(
    name="sync",
    help="how replicas are kept together",
    record=Sync,
    fields=FIELDS,
    rules=(_wrong,),
    unexecutable=_unexecutable,
)
