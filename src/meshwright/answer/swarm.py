"""A swarm of peers as a part of an answer: its steps in a world, and where their time goes."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.answer.asked import asked_assumptions, asked_attribution, asked_cautions, asked_classes
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.causes import CAUSE, PRICED, STEP
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import ATTRIBUTES, KIND, QUEUE, RankClass
from meshwright.plan import Plan
from meshwright.simulate.asked_sizes import asked
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.swarm import SwarmWorld
from meshwright.simulate.swarm_sizes import class_of, swarmed, wave_of
from meshwright.sync.record import NO_CODEC
from meshwright.timeline import Identity, Timeline
from meshwright.world.crowd import ALIKE
from meshwright.world.slow import SlowStep
from meshwright.world.trace import JobWorld, changes, unknown_nodes


def world_of(world: JobWorld | None, plan: Plan) -> SwarmWorld:
    """Return what a world holds for the peers of a plan, and for the rank that asks them for their experts.

    Raises:
        MeshwrightError: O006 for words that a swarm has nothing for, O007 for nodes that there are not.
    """
    peers = plan.num_ranks
    if world is None:
        return SwarmWorld((1.0,) * peers, (1.0,) * peers)
    slow = world.slow or SlowStep(seed=world.seed)
    if slow.slowlink:
        message = "slowlink= is of two ranks that send to each other, and peers send to whoever trains"
        raise MeshwrightError.one("O006", message, place="--world", help="say slownic= of a peer's port")
    if world.trace is not None and any(one.slowdown is not None for one in world.trace):
        message = "a trace's `slow` lines are of a whole job, and peers differ"
        raise MeshwrightError.one("O006", message, place=f"--world {world.source}", help="say slow=3x1.5 of a peer")
    if plan.passes.peers and any(one.node == 0 for one in world.trace or ()):
        message = "rank 0 trains, and nobody goes on without it: the trace has it fail"
        raise MeshwrightError.one("O006", message, place=f"--world {world.source}", help="peers are ranks from 1 on")
    unknown = unknown_nodes(world.trace or (), peers, world.source)
    if unknown:
        raise MeshwrightError(unknown)
    return SwarmWorld(
        computing=tuple(slow.computing(peers).tolist()),
        sending=tuple(slow.sending(peer, peer) for peer in range(peers)),
        jitter=world.jitter or ALIKE,
        seed=world.seed,
        failures=(one for one in changes(world, world.mtbf_s, 0) if one.slowdown is None),
        spares=world.spares,
        repair_s=world.repair_s,
        restart_s=world.restart_s or 0.0,
    )


def swarm_in_world(run: Simulated, costs: Costs, world: JobWorld | None) -> Simulated:
    """The step of a plan's swarm that was simulated among peers that are alike and stay, in a world; any other plan's
    as it is."""
    if run.swarm is None or world is None:
        return run
    lowered = run.lowered
    plan, train = lowered.plan, lowered.stages.train
    found = world_of(world, plan)
    steps = swarmed if plan.passes.swarm is not None else asked
    swarm = steps(plan, lowered.mesh.cluster, train, wave_of(run.wave, costs), costs, found)
    return msgspec.structs.replace(run, swarm=swarm)


def swarm_attribution(run: Simulated, costs: Costs) -> dict[str, float]:
    """Seconds of a step by cause, in the mean over peers; a backward's forward is ``recompute``, and what a peer waits
    for work, on its way or not yet there, is ``bubble``."""
    swarm, wave = run.swarm, wave_of(run.wave, costs)
    if run.lowered.plan.passes.peers:
        return asked_attribution(run, wave, costs)
    forward, backward = wave.forward.mean((0, 1)), wave.backward.mean((0, 1))
    parts = forward + backward
    parts[CAUSE["recompute"]] += forward.sum()
    parts *= swarm.computing_s / parts.sum()
    parts[CAUSE["dp"]] += swarm.sum_s
    parts[CAUSE["optimizer"]] += swarm.update_s
    whole = float(np.mean(swarm.step_s))
    out = dict.fromkeys((cause.name for cause in STEP), 0.0)
    out |= {name: float(seconds) for name, seconds in zip(PRICED, parts)}
    out["bubble"] = max(0.0, whole - float(parts.sum()))
    return {name: seconds * swarm.mean_s / whole for name, seconds in out.items()}


def peer_classes(run: Simulated) -> tuple[RankClass, ...]:
    """The peers of a swarm as ranks: by their stage in the plan, and their place along dp."""
    layout, mesh = run.lowered.plan.layout, run.lowered.mesh
    if run.lowered.plan.passes.peers:
        return asked_classes(run)
    out = []
    for rank in range(layout.num_ranks):
        stage, place = rank // layout.stride("pp") % layout.pp, rank // layout.stride("dp") % layout.dp
        device = mesh.cluster.island_of(rank).device.name
        out.append(RankClass(stage=stage, device=device, at=(("dp", place),)))
    return tuple(out)


def of_peers(run: Simulated, ranks: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
    """The memory of every peer, from that of the classes of ranks."""
    if run.lowered.plan.passes.peers:
        return ranks
    pp, found = run.lowered.plan.layout.pp, peer_classes(run)
    kinds = class_of(run.lowered.mesh)
    held = [ranks[kinds[one.at[0][1]] * pp + one.stage] for one in found]
    return tuple(msgspec.structs.replace(rank, rank=one.name, multiplicity=1) for rank, one in zip(held, found))


def swarm_timeline(run: Simulated, who: Identity) -> Timeline:
    """The last simulated step of a swarm, peer by peer."""
    spans = run.swarm.spans
    attributes = np.full((len(ATTRIBUTES), len(spans)), -1, np.int32)
    attributes[ATTRIBUTES.index("stage")] = [one.stage for one in spans]
    attributes[ATTRIBUTES.index("microbatch")] = [one.microbatch for one in spans]
    names = sorted({one.kind for one in spans})
    return Timeline(
        ranks=peer_classes(run),
        task=np.arange(len(spans), dtype=np.int32),
        rank=np.array([one.peer for one in spans], np.int32),
        queue=np.array([QUEUE[one.queue] for one in spans], np.int32),
        kind=np.array([KIND[one.kind] for one in spans], np.uint8),
        attributes=attributes,
        start_s=np.array([one.start_s for one in spans], np.float64),
        end_s=np.array([one.end_s for one in spans], np.float64),
        waited_for=np.full(len(spans), -1, np.int32),
        cost_key=np.array([names.index(one.kind) for one in spans], np.int32),
        keys=tuple(names),
        identity=who,
    )


def swarm_assumptions(run: Simulated, world: JobWorld | None) -> tuple[Assumption, ...]:
    """The assumptions behind the steps of a swarm."""
    if run.swarm is None:
        return ()
    if run.lowered.plan.passes.peers:
        return asked_assumptions(run, world)
    met = "in the world that is said" if world is not None else "of peers that stay"
    return (
        Assumption(
            "peers",
            f"{len(run.swarm.step_s)} steps simulated {met}",
            "whoever trains is never waited for, and has ports enough; a peer's speed at another stage is its own by "
            "that of the stages; the timeline is that of the last step",
        ),
    )


def swarm_cautions(plan: Plan) -> tuple[str, ...]:
    """A caution where what goes between the stages of a swarm loses digits, or experts take steps by themselves."""
    if not plan.several and plan.passes.peers:
        return asked_cautions(plan)
    if plan.several or plan.passes.swarm is None or plan.passes.swarm.code == NO_CODEC:
        return ()
    code = plan.passes.swarm.code
    said = f"passes={plan.passes.policy} is approximate: what goes between stages travels in {code}, and loses digits"
    return (said,)
