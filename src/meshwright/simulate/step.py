"""A training step on the virtual clock: lower, price, time."""

from __future__ import annotations

import msgspec

from meshwright.cost import Costs
from meshwright.lower import Lowered, bind, bind_pools, structured
from meshwright.lower.facts import Facts
from meshwright.lower.place import Mesh
from meshwright.lower.pools import placed
from meshwright.lower.stages import Stages
from meshwright.lower.structure import Structure
from meshwright.plan import Plan
from meshwright.plan.facets.passes import FIXED
from meshwright.plan.facets.sync import Sync
from meshwright.plan.filling import num_frozen, trained_part, without_frozen
from meshwright.simulate.asked_sizes import asked
from meshwright.simulate.clock import times
from meshwright.simulate.filling import with_frozen
from meshwright.simulate.price import Pricer
from meshwright.simulate.schedule_times import fastest_order, takes_times
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.swarm_sizes import alone, swarmed, wave_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL


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
    here: stages with tables that know their layers (those that are trained), a pricer of these costs, and
    structures."""
    if plan.several:
        return _joint(plan, model, cluster, train, costs)
    if plan.passes.policy != FIXED:
        return _swarmed(plan, model, cluster, train, costs)
    if num_frozen(plan, model):
        own, part, known = without_frozen(plan), trained_part(plan, model), (stages, pricer, structures)
        said = dict(zip(("stages", "pricer", "structures"), known))
        run = simulate(own, part, cluster, train, costs, **said)
        return with_frozen(run, plan, model, cluster, train, costs, pricer)
    reference = read(plan.sync.policy).reference
    if reference:
        return _referenced(plan, model, cluster, train, costs, reference)
    scaling = read(plan.sync.policy).scaling
    if scaling is not None and scaling.apart:
        return _curved(plan, model, cluster, train, costs)
    if takes_times(plan):
        return fastest_order(plan, model, cluster, train, costs)
    return _alone(stages or Stages(plan, model, train, Mesh(plan, cluster)), costs, pricer, structures)


def _swarmed(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Simulated:
    """A plan whose stages, or whose experts, peers have."""
    plain, one = alone(plan, train)
    wave = simulate(plain, model, cluster, one, costs)
    fixed = _alone(Stages(plan, model, train, Mesh(plan, cluster)), costs)
    steps = swarmed if plan.passes.swarm is not None else asked
    swarm = steps(plan, cluster, train, wave_of(wave, costs), costs, None)
    return msgspec.structs.replace(fixed, swarm=swarm, wave=wave)


def _alone(
    stages: Stages, costs: Costs, pricer: Pricer | None = None, structures: dict[Facts, Structure] | None = None
) -> Simulated:
    """A plan of one pool, whose schedule takes no times."""
    found = structured(stages, known=structures)
    return timed(bind(found, stages, costs.framework.defaults.bucket_bytes), costs, pricer)


def _referenced(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs, every: int) -> Simulated:
    """A plan whose gradients are differences to those at a reference. When that moves its own gradients are exchanged
    as they are, by a pass over the batch before the step's: that is the step of ``sync=step``."""

    def one(plan: Plan) -> Simulated:
        if takes_times(plan):
            return fastest_order(plan, model, cluster, train, costs)
        return _alone(Stages(plan, model, train, Mesh(plan, cluster)), costs)

    moving = one(msgspec.structs.replace(plan, sync=Sync(policy=USUAL)))
    return msgspec.structs.replace(one(plan), moving=moving, share=1 / every)


def _curved(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Simulated:
    """A plan whose replicas pass the batch of a round's last step to both sides of their parameters besides, each by
    itself: two steps of one of them."""
    one = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=1), sync=Sync(policy=USUAL))
    share = msgspec.structs.replace(train, global_batch=train.global_batch // plan.layout.dp)
    own = _alone(Stages(plan, model, train, Mesh(plan, cluster)), costs)
    moving = simulate(one, model, cluster, share, costs)
    return msgspec.structs.replace(own, moving=moving, share=2 / read(plan.sync.policy).spacing)


def _joint(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Simulated:
    """The step of a plan of several pools. A schedule that takes times takes those of its pool alone."""
    pools, params = [], {}
    for one in placed(plan, model, cluster, train):
        own = one.stages
        if takes_times(own.plan):
            alone = fastest_order(own.plan, own.model, own.mesh.cluster, train, costs).schedule_params
            one, params[one.pool.name] = msgspec.structs.replace(one, schedule_params=alone), alone
        pools.append(one)
    lowered = bind_pools(plan, tuple(pools), model, cluster, costs.framework.defaults.bucket_bytes)
    return msgspec.structs.replace(timed(lowered, costs), schedule_params=params)


def timed(lowered: Lowered, costs: Costs, pricer: Pricer | None = None) -> Simulated:
    """Price a lowered plan and run the clock."""
    priced = (pricer or Pricer(costs)).all(lowered.programs)
    return Simulated.of(lowered, priced, times(lowered, priced, costs), costs)
