"""A training step on the virtual clock: lower, price, time."""

from __future__ import annotations

from meshwright.cost import Costs
from meshwright.lower import Lowered, bind, structured
from meshwright.lower.facts import Facts
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.structure import Structure
from meshwright.plan import Plan
from meshwright.simulate.clock import times
from meshwright.simulate.price import Pricer
from meshwright.simulate.schedule_times import fastest_order, takes_times
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def simulate(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    train: Train,
    costs: Costs,
    *,
    stages: Stages | None = None,
    pricer: Pricer | None = None,
    structures: dict[Facts, Structure] | None = None,
) -> Simulated:
    """Lower, price and run the clock for a legal plan with ``dp`` filled in. Plans of one question share what they give
    here: stages with tables that know their layers, a pricer of these costs, and structures."""
    if takes_times(plan):
        return fastest_order(plan, model, cluster, train, costs)
    stages = stages or Stages(plan, model, train, Mesh(plan, cluster))
    found = structured(stages, known=structures)
    return timed(bind(found, stages, costs.framework.defaults.bucket_bytes), costs, pricer)


def timed(lowered: Lowered, costs: Costs, pricer: Pricer | None = None) -> Simulated:
    """Price a lowered plan and run the clock."""
    priced = (pricer or Pricer(costs)).all(lowered.programs)
    return Simulated.of(lowered, priced, times(lowered, priced, costs), costs)
