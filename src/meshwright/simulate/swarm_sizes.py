"""Times of the passes, messages, sums and updates of a swarm of peers on a cluster, priced as those of any plan.

A step of one microbatch under fixed ranks is lowered and priced (a *wave*): its passes are those that peers do, its
memory is that of a peer, which holds one microbatch at a time, and its ranks are the peers.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.graph import KIND, QUEUE
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.plan.facets.passes import UNDER_WAY, Passes
from meshwright.plan.slices import kinds
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.swarm import SwarmRun, SwarmSizes, SwarmWorld, simulate_swarm
from meshwright.spec.cluster import Cluster
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.work import Collective, Elementwise
from meshwright.world.swarm import Swarm

#: Requests that are simulated at most, and the steps at most and at least.
MOST_REQUESTS, MOST_STEPS, LEAST_STEPS = 60_000, 12, 3


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of one microbatch by the classes of ranks (slices) that do them: seconds by cause of the forward and
    of the backward [classes, stages, causes], of the update [classes, stages], of the gradients' sum over the ranks
    of each stage [stages], and the class of every slice along dp."""

    run: Simulated
    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    sums: np.ndarray
    class_of: tuple[int, ...]


def alone(plan: Plan, train: Train) -> tuple[Plan, Train]:
    """The plan of fixed ranks, and the workload of one microbatch each."""
    plain = msgspec.structs.replace(plan, passes=Passes())
    one = msgspec.structs.replace(train, global_batch=plan.layout.dp * plan.pipeline.microbatch)
    return plain, one


def wave_of(run: Simulated, costs: Costs) -> Wave:
    """Read the parts of a simulated wave."""
    lowered, graph = run.lowered, run.lowered.graph
    mesh, pp = lowered.mesh, lowered.plan.layout.pp
    classes = len(mesh.slices)
    shape = (classes, pp)
    forward, backward = np.zeros((*shape, len(PRICED))), np.zeros((*shape, len(PRICED)))
    update, sums = np.zeros(shape), np.zeros(pp)
    parts, ranks = run.priced.parts[graph.cost_key], graph.streams.ranks
    pricer = Pricer(costs)
    for i in range(graph.num_tasks):
        stream = graph.member[graph.member_ptr[i]]
        rank = ranks[graph.streams.rank[stream]]
        at = (max(rank.slice, 0), rank.stage)
        program = lowered.programs[graph.cost_key[i]]
        if graph.kind[i] == KIND["F"]:
            forward[at] += parts[i]
        elif graph.kind[i] in (KIND["B"], KIND["W"], KIND["BW"]):
            backward[at] += parts[i]
        elif program.kind == "update":
            update[at] += parts[i].sum()
        elif graph.streams.queue[stream] == QUEUE["dp"] and program.moves and at[0] == 0:
            members = graph.member[graph.member_ptr[i] : graph.member_ptr[i + 1]]
            if len({ranks[graph.streams.rank[one]].stage for one in members}) == 1:  # not the norm, which is of all
                sums[at[1]] += pricer(program).seconds
    # a step's seconds of exchanges beside the backward are not lost by a pass that nothing is exchanged beside
    backward[..., CAUSE["dp"]] = 0.0
    return Wave(
        run=run,
        forward=forward,
        backward=backward,
        update=update,
        sums=sums,
        class_of=class_of(mesh),
    )


def class_of(mesh: Mesh) -> tuple[int, ...]:
    """The class of every slice along dp, by its number."""
    of = {member: number for number, kind in enumerate(kinds(mesh.layout, mesh.cluster)) for member in kind.members}
    return tuple(of[member] for member in range(mesh.layout.dp))


def swarm_sizes(plan: Plan, cluster: Cluster, wave: Wave, costs: Costs) -> SwarmSizes:
    """The times of the peers of a plan, which are its ranks in their order."""
    layout, lowered = plan.layout, wave.run.lowered
    words, mesh = plan.passes.swarm, lowered.mesh
    peers, context = layout.num_ranks, lowered.stages.context()
    values = round(context.tokens * context.model.hidden)
    code = codec(words.code)
    num_bytes = sum(code.messages(values, int(context.element)))
    places = [
        (rank // layout.stride("dp") % layout.dp, rank // layout.stride("pp") % layout.pp) for rank in range(peers)
    ]
    device = mesh.slices[0].devices[0]

    def sending_s(rank: int, num_bytes: float) -> float:
        node = cluster.island_of(rank).node.devices
        other = 0 if rank // node else peers - 1
        group = mesh.pair(rank, other if other != rank else (rank + 1) % peers)
        return costs.price(Collective(op="send", num_bytes=num_bytes, group=group), device).seconds

    def passes(of: np.ndarray) -> tuple[tuple[float, ...], ...]:
        """Seconds on every peer: at its own stage those of its device, at others as much longer as those are."""
        seconds, mean = of.sum(-1), of.sum(-1).mean(0)
        rows = []
        for slice_, own in places:
            mine = seconds[wave.class_of[slice_]]
            rows.append(tuple(float(mine[own] * mean[stage] / mean[own]) for stage in range(layout.pp)))
        return tuple(rows)

    moved = sum(code.moved(values, int(context.element))) / 2 if words.code != "none" else 0.0
    coding = costs.price(Elementwise(num_bytes=moved, kernels=1, fused=True), device).seconds if moved else 0.0
    held = lowered.static_bytes[: layout.pp]
    state = [one.get("parameters", 0.0) + one.get("optimizer", 0.0) for one in held]
    return SwarmSizes(
        forward_s=passes(wave.forward),
        backward_s=passes(wave.forward + wave.backward),
        message_s=tuple(sending_s(rank, num_bytes) for rank in range(peers)),
        message_bytes=num_bytes,
        code_s=coding,
        sum_s=tuple(_over_members(float(seconds), layout.dp, peers) for seconds in wave.sums),
        update_s=tuple(tuple(wave.update[wave.class_of[slice_]].tolist()) for slice_, _ in places),
        state_s=tuple(max(sending_s(rank, size) for rank in (0, peers - 1)) for size in state),
    )


def _over_members(seconds: float, dp: int, most: int) -> tuple[float, ...]:
    """Seconds of a sum among 0 to `most` ranks, of one that takes so long among dp: in a ring each sends 2(n-1)/n of
    the values."""
    share = (dp - 1) / dp
    return tuple(0.0 if n < 2 or not share else seconds * ((n - 1) / n) / share for n in range(most + 1))


def decider_of(plan: Plan, train: Train) -> Swarm:
    """The decider of a plan's swarm."""
    layout, words = plan.layout, plan.passes.swarm
    return Swarm(
        stages=layout.pp,
        stage_of=tuple(rank // layout.stride("pp") % layout.pp for rank in range(layout.num_ranks)),
        microbatches=train.global_batch // plan.pipeline.microbatch,
        trainers=words.trainers or UNDER_WAY * layout.num_ranks,
        rebalance_s=words.rebalance_s,
    )


def steps_of(decider: Swarm) -> int:
    """Steps that are simulated."""
    return max(LEAST_STEPS, min(MOST_STEPS, MOST_REQUESTS // (2 * decider.microbatches * decider.stages)))


def swarmed(plan: Plan, cluster: Cluster, train: Train, wave: Wave, costs: Costs, world: SwarmWorld | None) -> SwarmRun:
    """The steps of a plan's swarm in a world; None: peers are as fast as their devices, and stay."""
    decider = decider_of(plan, train)
    ones = (1.0,) * plan.layout.num_ranks
    return simulate_swarm(
        swarm_sizes(plan, cluster, wave, costs), decider, world or SwarmWorld(ones, ones), steps_of(decider)
    )
