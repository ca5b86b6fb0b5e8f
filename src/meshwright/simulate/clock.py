"""Times of every task of a lowered and priced plan: the engine that its cluster asks for.

In-order queues with ports to themselves are a longest path; ports that exchanges share (``Level.shared_ports``) and
cores that ranks share (``Device.cores``) are flows on the event engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost import Costs
from meshwright.lower import Lowered
from meshwright.simulate import cores, engine, ports
from meshwright.simulate.engine import Times
from meshwright.simulate.price import Priced

#: Tasks of a step up to which exchanges inside passes share ports too; each becomes many.
CUT_TASKS = 5_000


def in_order(lowered: Lowered) -> bool:
    """Whether a step is a longest path: no ports and no cores are shared."""
    return not lowered.mesh.cluster.shares_ports and not cores.crowded(lowered)


def step_times(lowered: Lowered, priced: Sequence[tuple[Priced, Costs]]) -> list[float]:
    """Seconds of the step under several prices, each with the costs that it comes from."""
    if not in_order(lowered):
        return [float(times(lowered, one, costs)[1].max()) for one, costs in priced]
    return engine.makespans(lowered.graph, np.array([one.durations for one, _ in priced])).tolist()


def times(lowered: Lowered, priced: Priced, costs: Costs) -> Times:
    """Start and end of every task, seconds. `costs` are those that `priced` comes from."""
    if lowered.mesh.cluster.shares_ports:
        return ports.times(lowered, costs, inside=lowered.graph.num_tasks <= CUT_TASKS)
    if cores.crowded(lowered):
        return cores.times(lowered, priced)
    return engine.times(lowered.graph, priced.durations)
