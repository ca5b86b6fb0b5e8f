"""HFReduce (An et al. 2408.14158): gradients are summed in the memory of hosts, in every step.

Devices copy whole gradients to their host, whose processors add them up; hosts sum over a double tree, and the result
goes back to every device. No multiprocessor takes part, so that kernels go on beside it as fast as alone, and a
gradient passes each device's PCI Express once in each direction, where a ring passes it twice. What it puts on the
links of a host is in ``cost/host_reduce.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.fragments import GRADIENTS, Fragment, Stored, Weights, gradients
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.step import STEP

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The choices of HFReduce: the sum of gradients in every step, made by hosts."""
    return {"fragments": (GRADIENTS,), "combine": "sum", "hosted": True}


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Whole gradients to the sums of hosts."""
    if weights.trained:
        yield msgspec.structs.replace(gradients(plan, weights, stored), hosted=True)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans without whole gradients to sum, and clusters without hosts whose devices copy to them."""
    layout = plan.layout
    if layout.zero:
        yield _bad(
            f"zero{layout.zero} scatters sums over the ranks that update them, and hosts sum whole gradients for all",
            f"layout.zero = {layout.zero}",
            "drop zero or fsdp, or drop sync",
        )
    if layout.dp * layout.cp < 2:
        message = "gradients are summed over replicas, and the plan has one"
        yield _bad(message, f"layout.dp = {layout.dp}", "give the plan dp of 2 or more, or drop sync")
    for island in cluster.islands:
        joined = prod(level.arity for level in island.levels if not level.scale_out)
        if island.device.cores:
            message = f"devices of {island.name} are the host's own cores, which have its memory without copies"
            yield _bad(message, f"cluster island {island.name}", "drop sync: the usual sum is made by the host there")
        elif joined > island.node.devices:
            message = f"{joined} devices of {island.name} are joined past their hosts of {island.node.devices}"
            yield _bad(message, f"cluster island {island.name}", "drop sync: no host is between those devices")


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync=hfreduce", help=help)


HFREDUCE = SyncRule(
    name="hfreduce",
    title="every step, summed by the hosts",
    paper="An et al., 2024, arXiv 2408.14158",
    exact=True,
    choices=choices,
    fragments=fragments,
    together=STEP.together,
    wrong=wrong,
)

RULES = (HFREDUCE,)
