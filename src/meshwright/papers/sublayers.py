"""Products that tensor-parallel ranks sum: what such a product takes with its sum, as a plan overlaps them."""

from __future__ import annotations

from statistics import geometric_mean

import msgspec

from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.lower import lower
from meshwright.lower.entry import PRODUCT
from meshwright.lower.program import LayerPass
from meshwright.lower.rewrites import rewritten
from meshwright.lower.rewrites.slice import pairs_of
from meshwright.plan import Plan
from meshwright.simulate.layer import CAUSE, cost
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def sublayer_seconds(model: Model, cluster: Cluster, train: Train, plan: Plan, costs: Costs) -> float:
    """Return the geometric mean of the seconds that one product takes with its sum over tensor-parallel ranks, over
    those of the forward and backward of a layer, each by itself and without the host's time: as the plan overlaps them.

    Raises:
        MeshwrightError: J008 where no product of the plan is summed.
    """
    waiting = msgspec.structs.replace(plan, overlap=msgspec.structs.replace(plan.overlap, tp=False, how=""))
    lowered = lower(waiting, model, cluster, train)
    passes = [one for program in lowered.programs if program.kind == "pass" for one in program.layers]
    found = [seconds for one in _blocks(passes) for seconds in _each(one, plan, cluster, costs)]
    if not found:
        message = "no product of the plan is summed over tensor-parallel ranks"
        raise MeshwrightError.one("J008", message, place="plan", help="say tp of 2 or more")
    return geometric_mean(found)


def _blocks(passes: list[LayerPass]) -> list[LayerPass]:
    """Return a forward and a backward of a layer: those with the most summed products."""
    best = {"F": None, "BW": None, "B": None}
    for one in passes:
        if one.which in best and (best[one.which] is None or _sums(one) > _sums(best[one.which])):
            best[one.which] = one
    return [one for one in (best["F"], best["BW"] or best["B"]) if one is not None]


def _sums(one: LayerPass) -> int:
    return sum(one.entries[i].role == PRODUCT for i, _ in pairs_of(one.entries))


def _each(one: LayerPass, plan: Plan, cluster: Cluster, costs: Costs) -> list[float]:
    found = []
    for i, k in pairs_of(one.entries):
        if one.entries[i].role != PRODUCT:
            continue
        alone = [one.entries[i]._replace(after=(), late=()), one.entries[k]._replace(after=(0,), late=())]
        entries = rewritten(alone, (1,), plan.overlap)
        took = cost(entries, one.which, cluster.islands[0].device, costs)
        found.append(took.seconds - float(took.parts[CAUSE["host"]]))
    return found
