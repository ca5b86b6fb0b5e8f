"""Ways for a job to go on after a failure, with what each costs: which decider, which sizes, in which words.

``checkpoint`` restarts from disks; with ``saving=lazy`` a checkpoint is copied to the host beside the next forward and
backward, and written beside later steps (DataStates-LLM, Maurya et al., 2406.10707). ``memory`` restarts from the copy
of every step in a neighbour's memory (Gemini, Wang et al., SOSP 2023). ``elastic`` does so without a restart, on the
nodes that are left (ElasWave, 2510.00606).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt

import msgspec

from meshwright.lower import Lowered
from meshwright.quantity import seconds
from meshwright.simulate.job import JobSizes
from meshwright.spec.cluster import Cluster
from meshwright.sync.policy import read
from meshwright.world.elastic import Elastic
from meshwright.world.recovery import Recovery
from meshwright.world.trace import JobWorld

#: Until a node that is silent counts as lost (``run/watchdog.py``), and until communicators are edited ("within one
#: second", ElasWave's abstract).
DETECTED_S, EDITED_S = 10.0, 1.0
#: Nodes that may be lost at the same time before an elastic job waits.
MOST_LOST = 8


class RecoveryWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way to go on: its name, the sizes of the job, the decider, the steps between those that count, and in words
    how steps are kept and what lies between a failure and the next step."""

    name: str
    job: JobSizes
    decider: Recovery | Elastic
    every: int
    keeps: str
    restarts: str


class StateBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job as it lies on a device: ``each`` bytes of it that this one keeps, ``alone`` those that no
    replica holds, and bytes a second from there to the host and to another node. ``rounds``: steps between those after
    which every replica holds the same, 1 where they step together or never do."""

    each: float
    alone: float
    copy_bytes_s: float
    send_bytes_s: float
    rounds: int = 1

    @property
    def copy_s(self) -> float:
        """Seconds until the state is in the host's memory."""
        return self.each / self.copy_bytes_s

    @property
    def send_s(self) -> float:
        """Seconds until what no replica holds is in another node's memory."""
        return self.alone / self.send_bytes_s


def state_of(lowered: Lowered, cluster: Cluster, stored_bytes: float) -> StateBytes:
    """The state of a job of which all devices together store so many bytes."""
    layout, island = lowered.parts[0].plan.layout, cluster.islands[0]
    each = stored_bytes / len(lowered.static_bytes)
    replicated = layout.zero == 0 and layout.dp * layout.cp > 1
    rounds = 1 if lowered.several else max(1, read(lowered.plan.sync.policy).alike_every)
    return StateBytes(
        each=each,
        alone=0.0 if replicated or rounds > 1 else each,
        rounds=rounds,
        copy_bytes_s=island.node.copies_gb_s * 1e9,
        send_bytes_s=_out_bytes_s(cluster),
    )


def _out_bytes_s(cluster: Cluster) -> float:
    """Bytes a second from a device to another node; to another device where there is one node."""
    inside = 1
    for level in cluster.islands[0].levels:
        if level.scale_out:
            return level.busy_gb_s * 1e9 / inside
        inside *= level.arity
    return cluster.islands[0].levels[0].busy_gb_s * 1e9


def ways(
    world: JobWorld,
    job: JobSizes,
    every: int,
    mtbf_s: float | None,
    state: StateBytes,
    passes_s: float,
    nodes: int,
    on_fewer: Callable[[int], float | None],
) -> list[RecoveryWay]:
    """The ways that a world asks for. `job` is that of blocking checkpoints, one in `every` steps; `passes_s` are the
    seconds of a step in which its state does not change and links are not waited for; `on_fewer` gives those of a step
    on fewer nodes, None where there is no plan."""
    asked = ("checkpoint", "lazy", "memory", "elastic") if world.recovery == "all" else (world.recovery,)
    if asked == ("checkpoint",) and world.saving == "lazy":
        asked = ("lazy",)
    minutes = f"{job.restart_s / 60:.3g} min from a failure to the next step"
    made: dict[str, Callable[[], RecoveryWay]] = {
        "checkpoint": lambda: RecoveryWay(
            name="checkpoint",
            job=job,
            decider=Recovery(save_every=every, spares=world.spares),
            every=every,
            keeps=f"{job.save_s:.1f} s every {every:,} steps, {every * job.step_s / 60:.3g} min, blocking",
            restarts=minutes,
        ),
        "lazy": lambda: _lazy(world, job, mtbf_s, state, passes_s, minutes),
        "memory": lambda: _memory(world, job, state, passes_s, minutes),
        "elastic": lambda: _elastic(world, job, state, passes_s, nodes, on_fewer),
    }
    return [made[name]() for name in asked]


def _lazy(
    world: JobWorld, job: JobSizes, mtbf_s: float | None, state: StateBytes, passes_s: float, minutes: str
) -> RecoveryWay:
    """Checkpoints that are copied beside passes and written beside steps. Young's interval, sqrt(2 d M), is that of the
    seconds d that training stands still, and no shorter than one takes to be written; where an interval that is said is
    shorter, training waits for the drives."""
    stands_s = max(0.0, state.copy_s - passes_s)
    flush_s = job.save_s + min(state.copy_s, passes_s)
    if world.checkpoint_s is None:
        every_s = max(sqrt(2 * stands_s * (mtbf_s or 0.0)), flush_s)
        every = min(job.num_steps, max(1, ceil(every_s / job.step_s)))
    else:
        every = min(job.num_steps, max(1, round(world.checkpoint_s / job.step_s)))
        stands_s = max(stands_s, job.save_s - every * job.step_s)  # drives write no faster, and the host is full
    apart = f"{'every step' if every == 1 else f'every {every:,} steps'}, {every * job.step_s / 60:.3g} min"
    return RecoveryWay(
        name="lazy",
        job=msgspec.structs.replace(job, save_s=stands_s, flush_s=flush_s),
        decider=Recovery(save_every=every, spares=world.spares),
        every=every,
        keeps=f"{seconds(stands_s)} {apart}, {seconds(flush_s)} beside training until one counts",
        restarts=minutes,
    )


def _in_memory(job: JobSizes, state: StateBytes, passes_s: float) -> tuple[JobSizes, str]:
    """The sizes of a job whose every step is kept in two memories: copies and messages go on beside each other. At the
    end of a round every replica holds what all go on from, and a copy of it on its host."""
    if state.rounds > 1:
        stands_s = max(0.0, state.copy_s - passes_s)
        apart = f"{seconds(stands_s)} every {state.rounds:,} steps"
        return msgspec.structs.replace(job, save_s=stands_s), f"{apart}: every replica holds the end of a round"
    kept_s = max(state.copy_s, state.send_s)
    stands_s = max(0.0, kept_s - passes_s)
    how = f"{seconds(stands_s)} a step: its state is in two memories after {seconds(kept_s)}, beside the next"
    return msgspec.structs.replace(job, save_s=stands_s), how


def _memory(world: JobWorld, job: JobSizes, state: StateBytes, passes_s: float, minutes: str) -> RecoveryWay:
    sizes, how = _in_memory(job, state, passes_s)
    decider, every = Recovery(save_every=state.rounds, spares=world.spares), state.rounds
    return RecoveryWay(name="memory", job=sizes, decider=decider, every=every, keeps=how, restarts=minutes)


def _elastic(
    world: JobWorld,
    job: JobSizes,
    state: StateBytes,
    passes_s: float,
    nodes: int,
    on_fewer: Callable[[int], float | None],
) -> RecoveryWay:
    sizes, how = _in_memory(job, state, passes_s)
    regroup_s = DETECTED_S + EDITED_S + state.each / state.send_bytes_s if world.restart_s is None else world.restart_s
    step_of = {nodes: job.step_s}
    for left in range(nodes - 1, max(0, nodes - 1 - MOST_LOST), -1) if world.spares is not None else ():
        step_s = on_fewer(left)
        if step_s is not None:
            step_of[left] = max(step_s, job.step_s)
    few = f"{min(step_of):,} node{'s' * (min(step_of) > 1)}"
    return RecoveryWay(
        name="elastic",
        job=msgspec.structs.replace(
            sizes,
            regroup_s=regroup_s,
            # every replica that is left has what it goes on from
            shrink_s=DETECTED_S + EDITED_S if state.rounds > 1 and world.restart_s is None else None,
            in_rounds=state.rounds > 1,
            step_of=step_of,
        ),
        decider=Elastic(sizes=tuple(sorted(step_of)), spares=world.spares, save_every=state.rounds),
        every=state.rounds,
        keeps=how,
        restarts=f"{seconds(regroup_s)} from a failure to the next step, on {few} or more",
    )
