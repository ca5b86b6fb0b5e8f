"""Rules of a plan for adversarial steps, whose text is passed twice and, a step before, to find what it is moved by."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facets.passes import FIXED
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.record import USUAL


def _opposed(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P080 for everything under which a step has no two passes of a text, or its next text is not known."""
    if not train.adversarial:
        return
    layout, found = plan.layout, []
    if layout.gathers_again or layout.zero == 3:
        why = "parameters are gathered for one step's passes, and the next step's text is passed behind them"
        found.append(("layout.zero = 3", why, "say zero1 or zero2, or shard nothing"))
    if plan.sync.policy != USUAL:
        found.append((f"sync.policy = {plan.sync.policy}", "replicas do not take the same step", "drop sync="))
    if layout.shares or plan.kinds.computed or plan.kinds.mbs or plan.kinds.dtypes or len(cluster.islands) > 1:
        found.append(
            ("layout.shares", "ranks on unequal devices have shares of their own", "an island of equal devices")
        )
    if plan.offload.any:
        found.append(("offload", "what leaves the device comes back for one step's passes", "drop offload="))
    if plan.pipeline.fill or plan.passes.policy != FIXED:
        found.append(("passes", "waits are filled with other passes", "drop passes= and fill_layers="))
    if layout.pp > 1 and "t_f" in schedules.get(plan.pipeline.schedule).params:
        schedule = plan.pipeline.schedule
        why = f"{schedule} is searched for the times of one step's passes"
        found.append((f"pipeline.schedule = {schedule}", why, "say schedule=1f1b"))
    if plan.memory.loss_portions > 1 or plan.memory.portions > 1:
        found.append(("memory", "a loss in portions has gradients of weights at once", "drop portions"))
    if plan.sequence.groups != "static":
        found.append(("sequence.groups", "groups of ranks are formed for each batch", "drop groups="))
    if model.mixtures:
        found.append(("experts", f"routers of {model.name} would count the choices of moved text", "a dense model"))
    if len(model.flows) > 1 or model.streams:
        found.append(("model", f"{model.name} embeds more than one stream of text", "a decoder or encoder"))
    for place, why, help in found:
        message = f"adversarial={train.adversarial:g} passes a text twice: {why}"
        yield Diagnostic(code="P080", message=message, place=f"plan.{place}", help=f"{help}, or drop adversarial=")


RULES = (_opposed,)
