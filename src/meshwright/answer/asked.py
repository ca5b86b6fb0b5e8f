"""Experts that peers have, as a part of an answer: where the time of the rank that asks goes, and who holds what."""

from __future__ import annotations

import msgspec

from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.rank_memory import OVERHEAD, RESERVED
from meshwright.causes import PRICED, STEP
from meshwright.cost import Costs
from meshwright.graph import RankClass
from meshwright.plan import Plan
from meshwright.simulate.asked_sizes import expert_params, expert_pieces, forward_of, rank_parts
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.swarm_sizes import Wave
from meshwright.work import GroupedGemm
from meshwright.world.trace import JobWorld

#: What of a rank's memory is of its parameters.
STATE = ("parameters", "gradients", "optimizer")


def asked_attribution(run: Simulated, wave: Wave, costs: Costs) -> dict[str, float]:
    """Seconds of a step of the rank that trains by cause: what it computes, and as ``ep`` what it waits for peers."""
    swarm = run.swarm
    whole = sum(swarm.step_s) / len(swarm.step_s)
    out = dict.fromkeys((cause.name for cause in STEP), 0.0)
    parts = sum(rank_parts(wave, costs))
    computes = whole - swarm.waited_s - swarm.update_s
    out |= {name: float(one) * computes / float(parts.sum()) for name, one in zip(PRICED, parts)}
    out["optimizer"] += swarm.update_s
    out["ep"] += swarm.waited_s
    return {name: seconds * swarm.mean_s / whole for name, seconds in out.items()}


def asked_classes(run: Simulated) -> tuple[RankClass, ...]:
    """The rank that trains, and its peers."""
    island_of = run.lowered.mesh.cluster.island_of
    ranks = range(run.lowered.plan.num_ranks)
    names = ("trainer", *(f"peer {rank}" for rank in ranks[1:]))
    return tuple(RankClass(device=island_of(rank).device.name, label=name) for rank, name in zip(ranks, names))


def asked_memory(run: Simulated, ranks: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
    """The memory of the rank that trains and of every peer, from that of a rank that has all experts: a peer has its
    share of the experts' state and, at a time, of one mixture's rows."""
    if run.swarm is None or not run.lowered.plan.passes.peers:
        return ranks
    (whole,), wave = ranks, run.wave.lowered
    stages, peers = wave.stages, run.lowered.plan.passes.peers
    (composition,) = stages.compositions
    params = expert_params(stages)
    share = sum(params) / sum(stages.params(unit).dense + stages.params(unit).expert for unit in composition.units)
    layers = expert_pieces(stages)
    saved = [sum(piece.saved for piece in some) for some in layers]
    alive = dict(whole.alive)
    over = {name: alive.pop(name) for name in OVERHEAD if name in alive}
    trains = alive | {name: alive[name] * (1 - share) for name in STATE if name in alive}
    trains["activations"] = max(0.0, alive.get("activations", 0.0) - sum(saved))
    asked = {name: alive[name] * share / peers for name in STATE if name in alive}
    asked["gradients"] = asked.get("gradients", 0.0) * max(params) / sum(params)
    asked["activations"] = max(saved) / peers
    tensors = sum(alive.values())
    for held in (trains, asked):  # an allocator has reserved as much for each tensor
        part = sum(held.values()) / tensors
        held |= {name: size * part if name in RESERVED else size for name, size in over.items()}
    out = []
    for known, held in zip(asked_classes(run), (trains, *(asked for _ in range(peers)))):
        capacity = float(run.lowered.mesh.cluster.island_of(len(out)).device.memory_bytes)
        out.append(
            msgspec.structs.replace(
                whole,
                rank=known.name,
                multiplicity=1,
                capacity_bytes=capacity,
                peak_bytes=sum(held.values()),
                alive=held,
            )
        )
    return tuple(out)


def repeated_flops(run: Simulated) -> float:
    """Operations of a step that peers do again: the experts' forward, in every backward."""
    stages = run.wave.lowered.stages
    works = (work for some in expert_pieces(stages) for work in forward_of(some))
    once = sum(work.flops for work in works if isinstance(work, GroupedGemm))
    train, plan = run.lowered.stages.train, run.lowered.plan
    return once * plan.num_microbatches(train.global_batch)


def asked_assumptions(run: Simulated, world: JobWorld | None) -> tuple[Assumption, ...]:
    """The assumptions behind the steps of a rank that asks."""
    met = "in the world that is said" if world is not None else "of peers that stay"
    return (
        Assumption(
            "peers",
            f"{len(run.swarm.step_s)} steps simulated {met}",
            "every peer has as many rows; the rank asks and computes by turns, and its port takes one message at a "
            "time in each direction; the timeline is that of the last step",
        ),
    )


def asked_cautions(plan: Plan) -> tuple[str, ...]:
    """A caution: much is otherwise than where the rank has its experts."""
    return (
        f"passes={plan.passes.policy} is approximate: experts take a step for each microbatch, along gradients that "
        "are not clipped, and those that do not answer in time are left out",
    )
