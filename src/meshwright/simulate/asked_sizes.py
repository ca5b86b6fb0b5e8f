"""Times of a rank that trains and of the peers that have its experts, on a cluster, priced as those of any plan.

A step of one microbatch of a rank that has all experts is lowered and priced; the experts' pieces are taken out of it,
and priced again for the share of their rows and experts that a peer has, on its device.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright.causes import CAUSE
from meshwright.cost import Costs
from meshwright.layers.pieces import Piece
from meshwright.lower.stages import Stages
from meshwright.plan import Plan
from meshwright.simulate.asked import AskedSizes, simulate_asked
from meshwright.simulate.swarm import SwarmRun, SwarmWorld
from meshwright.simulate.swarm_sizes import LEAST_STEPS, MOST_REQUESTS, MOST_STEPS, Wave
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.workload import Train
from meshwright.work import Collective, Elementwise, GroupedGemm, Work

#: What the pieces of a mixture that are its routed experts are named by.
EXPERTS = "experts "


def expert_pieces(stages: Stages) -> list[list[Piece]]:
    """The pieces of the routed experts of every mixture, in the order of the forward."""
    (composition,) = stages.compositions
    found = ([p for p in stages.pieces(unit.kind) if p.name.startswith(EXPERTS)] for unit in composition.units)
    return [some for some in found if some]


def expert_params(stages: Stages) -> list[float]:
    """The parameters of every mixture's routed experts."""
    (composition,) = stages.compositions
    found = (stages.params(unit).expert for unit in composition.units)
    return [float(count) for count in found if count]


def forward_of(pieces: list[Piece]) -> Iterator[Work]:
    """The work of a forward."""
    yield from (piece.forward for piece in pieces if piece.forward is not None)


def backward_of(pieces: list[Piece]) -> Iterator[Work]:
    """The work of a backward."""
    for piece in pieces:
        yield from (work for work in (piece.backward, piece.weight) if work is not None)


def shared(work: Work, peers: int) -> Work:
    """The work of one of so many peers."""
    if isinstance(work, GroupedGemm):
        return msgspec.structs.replace(work, groups=work.groups // peers, rows=max(1, work.rows // peers))
    if isinstance(work, Elementwise):
        return msgspec.structs.replace(work, num_bytes=work.num_bytes / peers)
    return work


def dense_parts(parts: np.ndarray, work: Iterator[Work], costs: Costs, device: Device) -> np.ndarray:
    """Seconds by cause of a pass without this work of its experts."""
    out = parts.copy()
    for one in work:
        found = costs.price(one, device)
        out[CAUSE[found.cause]] -= found.seconds
    return np.maximum(out, 0.0)


def rank_parts(wave: Wave, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Seconds by cause of the forward and the backward of a microbatch on the rank that trains."""
    stages, device = wave.run.lowered.stages, wave.run.lowered.mesh.slices[0].devices[0]
    every = [piece for some in expert_pieces(stages) for piece in some]
    return (
        dense_parts(wave.forward[0, 0], forward_of(every), costs, device),
        dense_parts(wave.backward[0, 0], backward_of(every), costs, device),
    )


def asked_sizes(plan: Plan, cluster: Cluster, train: Train, wave: Wave, costs: Costs) -> AskedSizes:
    """The times of a plan's rank and peers; a peer's update takes its share of the time of that of all parameters."""
    stages, mesh, peers = wave.run.lowered.stages, wave.run.lowered.mesh, plan.passes.peers
    context = stages.context()
    layers, params = expert_pieces(stages), expert_params(stages)
    (composition,) = stages.compositions
    total = sum(stages.params(unit).dense + stages.params(unit).expert for unit in composition.units)
    routed = [stages.model.block(layer).mlp for layer in stages.model.routed_layers]
    rows = [context.routed_tokens * spec.top_k * spec.width(context.hidden) * context.element for spec in routed]
    update = float(wave.update[0, 0])
    devices = [cluster.island_of(rank).device for rank in range(1, peers + 1)]

    def seconds(some: Iterator[Work], device: Device) -> float:
        return sum(costs.price(shared(work, peers), device).seconds for work in some)

    def passes(device: Device) -> tuple[tuple[float, ...], tuple[float, ...]]:
        forward = tuple(seconds(forward_of(some), device) for some in layers)
        return forward, tuple(f + seconds(backward_of(some), device) for f, some in zip(forward, layers))

    found = {name: passes(device) for name, device in {one.name: one for one in devices}.items()}

    def sending(rank: int, num_bytes: float) -> float:
        work = Collective(op="send", num_bytes=num_bytes, group=mesh.pair(0, rank))
        return costs.price(work, mesh.slices[0].devices[0]).seconds

    ranks = range(1, peers + 1)
    forward, backward = rank_parts(wave, costs)
    updates = tuple(update * count / peers / total for count in params)
    kept = wave.run.lowered.static_bytes[0]
    state = (kept.get("parameters", 0.0) + kept.get("optimizer", 0.0)) * sum(params) / total / peers
    return AskedSizes(
        microbatches=plan.num_microbatches(train.global_batch),
        forward_s=float(forward.sum()),
        backward_s=float(backward.sum()),
        update_s=update * (1 - sum(params) / total),
        message_bytes=tuple(rows),
        message_s=tuple(tuple(sending(rank, one / peers) for one in rows) for rank in ranks),
        experts_forward_s=tuple(found[device.name][0] for device in devices),
        experts_backward_s=tuple(found[device.name][1] for device in devices),
        experts_update_s=(updates,) * peers,
        state_s=tuple(sending(rank, state) for rank in ranks),
    )


def asked(plan: Plan, cluster: Cluster, train: Train, wave: Wave, costs: Costs, world: SwarmWorld | None) -> SwarmRun:
    """The steps of a plan whose experts peers have, in a world; None: all are as fast as their devices, and stay."""
    sizes, words, ones = asked_sizes(plan, cluster, train, wave, costs), plan.passes.dmoe, (1.0,) * plan.num_ranks
    requests = 2 * sizes.microbatches * len(sizes.message_bytes) * words.peers
    steps = max(LEAST_STEPS, min(MOST_STEPS, MOST_REQUESTS // requests))
    return simulate_asked(sizes, words.wait_s, world or SwarmWorld(ones, ones), steps)
