"""When every task of a lowered and priced plan runs: the engine that its cluster asks for.

In-order queues with ports to themselves are a longest path; ports that exchanges share (``Level.shared_ports``) and
cores that ranks share (``Device.cores``) are flows on the event engine.
"""

from __future__ import annotations

from meshwright.cost import Costs
from meshwright.lower import Lowered
from meshwright.simulate import cores, engine, ports
from meshwright.simulate.engine import Times
from meshwright.simulate.price import Priced

#: Tasks of a step up to which exchanges inside passes share ports too; each becomes many.
CUT_TASKS = 5_000


def times(lowered: Lowered, priced: Priced, costs: Costs) -> Times:
    """Start and end of every task, seconds. `costs` are those that `priced` comes from."""
    if any(level.shared_ports for island in lowered.mesh.cluster.islands for level in island.levels):
        return ports.times(lowered, costs, inside=lowered.graph.num_tasks <= CUT_TASKS)
    if cores.crowded(lowered):
        return cores.times(lowered, priced)
    return engine.times(lowered.graph, priced.durations)
