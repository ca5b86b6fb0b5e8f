"""Steps of drawn batches: one structure of a plan, timed for microbatches that differ.

Where documents differ in length, each microbatch of each data-parallel rank is bound to its own items: every
data-parallel slice is a rank class of its own, and a pass has a cost key for every microbatch. All draws are timed by
one call of the engine. Beside them stands the same work in equal microbatches; what the drawn steps take longer, ranks
wait for one another because work is unequal.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright import layers
from meshwright.assign.draws import Drawn, draw
from meshwright.assign.groups import GroupCosts
from meshwright.cost import Costs
from meshwright.layers.kind import Tokens
from meshwright.lower import bind, structured
from meshwright.lower.known import Known
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import Plan
from meshwright.simulate.clock import times
from meshwright.simulate.engine import times as in_order
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate, timed
from meshwright.simulate.unfolded import Placed, Unfolded, mixed
from meshwright.spec.cluster import Cluster
from meshwright.spec.items import Batch, document
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Microbatches that are priced each on its own; where more differ, these are spread over the range of their attention
#: and the others lie between two of them.
PRICED = 33


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of drawn batches: their ``method``, ``rounds`` of a step and groups of each size in a step, in the
    mean, and how far their time may be from the least (``gap``), by the ``costs`` by which they were formed."""

    method: str
    rounds: float
    sizes: dict[int, float]
    gap: float
    costs: GroupCosts


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of drawn batches of a plan.

    ``typical`` is the step of one microbatch over and over, the one nearest the mean; ``even`` that of all drawn work
    in equal microbatches; ``shown`` the draw nearest the mean, with a rank class for each of ``classes`` of
    data-parallel slices. ``steps_s`` [draws] are seconds. ``distinct`` microbatches differ, of which ``priced`` were
    priced. ``groups``: of ranks, where they are formed for every batch. ``staying``: the step of microbatches whose
    activations stay on the device, where those of long documents alone are moved.
    """

    drawn: Drawn
    typical: Simulated
    even: Simulated
    shown: Simulated
    steps_s: NDArray[np.float64]
    classes: int
    distinct: int
    priced: int
    groups: GroupUse | None = None
    staying: Simulated | None = None

    @property
    def mean_s(self) -> float:
        """The expected step time, in seconds."""
        return float(self.steps_s.mean())

    @property
    def unequal_s(self) -> float:
        """Seconds of a step that ranks wait because microbatches are unequal."""
        return self.mean_s - self.even.step_time_s


def simulate_batches(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Batches | None:
    """Draw batches and time them, for a legal plan with ``dp`` filled in; None where sequences are whole."""
    drawn = draw(train, plan.pipeline.microbatch)
    if drawn is None:
        return None
    loads = drawn.loads(lambda length: mixing_flops(model, train, length))
    placed = place(drawn, loads)
    pricer, known = Pricer(costs), Known()

    def stages(batch: Batch, mesh: Mesh) -> Stages:
        like = Known(params=known.params, ends=known.ends, sites=known.sites)
        return Stages(plan, model, train, mesh, like, batch)

    folded = Mesh(plan, cluster)
    typical = simulate(plan, model, cluster, train, costs, stages=stages(placed.middle, folded), pricer=pricer)
    bucket = costs.framework.defaults.bucket_bytes
    if typical.lowered.stages.batch != placed.middle:  # an order that was searched for the mean of the documents
        kept, made = typical.schedule_params, stages(placed.middle, folded)
        typical = timed(bind(structured(made, kept), made, bucket), costs, pricer)
        typical = msgspec.structs.replace(typical, schedule_params=kept)
    if len(placed.batches) == 1:
        steps = np.full(drawn.num_draws, typical.step_time_s)
        return Batches(
            drawn=drawn,
            typical=typical,
            even=typical,
            shown=typical,
            steps_s=steps,
            classes=1,
            distinct=1,
            priced=1,
        )
    structure = structured(typical.lowered.stages, typical.schedule_params)
    priced = [pricer.all(bind(structure, stages(b, folded), bucket).programs) for b in placed.batches]
    mean = mixed(priced, placed.weights)
    even = Simulated.of(
        typical.lowered, mean, times(typical.lowered, mean, costs), costs, schedule_params=typical.schedule_params
    )
    unfolded = Unfolded(plan, cluster, typical, structure, loads, pricer)
    shared = even.step_time_s / float(in_order(even.lowered.graph, mean.durations)[1].max())
    steps, shown = unfolded.timed(placed, priced, costs, shared if abs(shared - 1.0) > 1e-9 else 1.0)
    return Batches(
        drawn=drawn,
        typical=typical,
        even=even,
        shown=shown,
        steps_s=steps,
        classes=len(unfolded.members),
        distinct=placed.distinct,
        priced=len(placed.batches),
    )


def mixing_flops(model: Model, train: Train, length: int) -> float:
    """Operations that mix a document's tokens with one another: what a microbatch has more or less of than another of
    as many tokens."""
    batch = ((document(length), 1),)
    found = 0.0
    for count, layer in model.all_layers:
        tokens = Tokens(model=model, batch=batch, rows=1, stream=layer.stream, masked=train.causal)
        found += count * layers.of(layer).flops(layer, tokens).mixing
    return found


def place(drawn: Drawn, loads: NDArray[np.float64]) -> Placed:
    """Choose the microbatches to price and place all others between them by their `loads` [draws, microbatches]."""
    load, first, back = np.unique(loads, return_index=True, return_inverse=True)
    back = back.reshape(loads.shape)
    if len(load) <= PRICED:
        chosen, low, share = np.arange(len(load)), back, np.zeros(loads.shape)
    else:
        chosen = np.unique(np.linspace(0, len(load) - 1, PRICED).round().astype(np.int64))
        at = np.clip(np.searchsorted(load[chosen], loads, side="right") - 1, 0, len(chosen) - 2)
        low, share = at, (loads - load[chosen][at]) / (load[chosen][at + 1] - load[chosen][at])
    batches = tuple(drawn.batch(*divmod(int(first[i]), loads.shape[1])) for i in chosen)
    middle = batches[int(np.argmin(np.abs(load[chosen] - loads.mean())))]
    return Placed(batches=batches, middle=middle, low=low, share=share, distinct=len(load))
