"""Sync: how replicas are kept together, by a rule of ``sync/rules`` with its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import EXCHANGE, KEYED, STRUCTURE, Facet, Field, Form
from meshwright.spec.workload import LAYERWISE
from meshwright.sync import policy, rounds
from meshwright.sync.record import USUAL

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
    if said.own_data and (train.clusters or train.packing == "balanced"):
        taken = f"clusters={train.clusters}" if train.clusters else "pack=balanced"
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
    yield from rounds.impossible(plan, model, said)


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
