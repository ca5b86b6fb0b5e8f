"""Memory of the tiers behind the devices: what a node's host and drives hold for all its ranks, and have room for."""

from __future__ import annotations

import numpy as np

from meshwright.answer.prediction import TierMemory
from meshwright.cost import Costs
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower import Lowered
from meshwright.lower.residency import held_stages
from meshwright.lower.tier_sizes import same_memory, tier_bytes, weight_bytes
from meshwright.plan.facets.offload import HOST
from meshwright.quantity import gibibytes
from meshwright.simulate import memory
from meshwright.simulate.simulated import Simulated

#: Share of a host's memory that is not the job's: operating system, data loading, the framework's own processes.
HOST_OWN = 0.05
#: Activations of the host's or the drives' part.
ACTIVATIONS = "activations"


def tier_memory(run: Simulated, costs: Costs) -> tuple[TierMemory, ...]:
    """The fullest node's memory in every tier that the plan uses; none where all is on the devices.

    Raises:
        MeshwrightError: P054 where the room for what is fetched ahead is larger than its tier.
    """
    if run.lowered.several or not run.lowered.plan.offload.any:
        return ()
    lowered, plan = run.lowered, run.lowered.plan
    stages, offload = lowered.stages, plan.offload
    held = held_stages(stages, lowered.actions)
    each = [tier_bytes(stages, some) for some in held]
    moved = _activations(run, lowered)
    for rank, kept in enumerate(each):
        if moved[rank]:
            kept[offload.activations][ACTIVATIONS] = kept[offload.activations].get(ACTIVATIONS, 0.0) + moved[rank]
    tiers = offload.tiers[1:] if same_memory(stages) else offload.tiers
    found = tuple(_fullest(lowered, tier, each) for tier in tiers)
    _refuse_windows(lowered, held, found)
    return found


def _activations(run: Simulated, lowered: Lowered) -> list[float]:
    """Bytes of activations that each pipeline rank has off its device at once."""
    pp, graph = lowered.plan.layout.pp, lowered.graph
    count = len(graph.streams.ranks)
    if not lowered.plan.offload.activations or graph.memory is None:
        return [0.0] * pp
    _, alive = memory.peaks(graph, run.start_s, run.end_s, 2 * count, None, run.memory_order)
    return alive[count : count + pp].sum(axis=1).tolist()


def _fullest(lowered: Lowered, tier: str, each: list[dict[str, dict[str, float]]]) -> TierMemory:
    """Return the memory of the fullest node in a tier: the sum over its ranks."""
    plan, cluster = lowered.plan, lowered.mesh.cluster
    categories = list(dict.fromkeys(category for kept in each for category in kept[tier]))
    table = np.array([[kept[tier].get(category, 0.0) for category in categories] for kept in each])
    stage = np.arange(plan.layout.num_ranks) // plan.layout.stride("pp") % plan.layout.pp
    worst: TierMemory | None = None
    for index, island in enumerate(cluster.islands):
        mine = stage[cluster.island_range(index).start : cluster.island_range(index).stop]
        node = island.node
        nodes = [mine[i : i + node.devices] for i in range(0, len(mine), node.devices)]
        for some in {tuple(one.tolist()) for one in nodes}:
            sums = table[list(some)].sum(axis=0)
            capacity = node.host_memory_bytes * (1 - HOST_OWN) if tier == HOST else float(node.nvme_bytes)
            one = TierMemory(
                tier=tier,
                island=island.name,
                num_ranks=len(some),
                capacity_bytes=capacity,
                peak_bytes=float(sums.sum()),
                alive=dict(zip(categories, sums.tolist())),
            )
            if worst is None or one.headroom_bytes < worst.headroom_bytes:
                worst = one
    assert worst is not None
    return worst


def _refuse_windows(lowered: Lowered, held: list[list[int]], tiers: tuple[TierMemory, ...]) -> None:
    """Refuse a window of fetched layers that is itself larger than the device, or than the host behind it."""
    offload, stages = lowered.plan.offload, lowered.stages
    found = [(f"the host of {t.num_ranks} ranks", t.alive.get("buffers", 0.0), t.capacity_bytes) for t in tiers]
    found = [one for one in found if one[1]]  # windows of what comes from drives are on the host
    if offload.params:
        segments = [s for some in held for stage in some for s in stages.compositions[stage].segments]
        window = sum(sorted(weight_bytes(stages, s) for s in segments)[-offload.prefetch - 1 :])
        found.append(("the device", window, float(min(d.memory_bytes for d in lowered.mesh.slices[0].devices))))
    wrong = [
        Diagnostic(
            code="P054",
            message=f"prefetch={offload.prefetch} keeps {gibibytes(window)} of layers on their way on {where}, "
            f"and it has {gibibytes(capacity)}",
            place=f"plan.offload.prefetch = {offload.prefetch}",
            help="a smaller prefetch=, or more tensor parallelism, which makes layers smaller",
        )
        for where, window, capacity in found
        if window > capacity
    ]
    if wrong:
        raise MeshwrightError(wrong)
