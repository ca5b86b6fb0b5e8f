"""A run of a swarm: a run like any other, whose trainer's steps are taken by peers."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
import torch

from meshwright.errors import MeshwrightError
from meshwright.run import launch
from meshwright.run.begin import begin
from meshwright.run.job import Job
from meshwright.run.loop import RankRun
from meshwright.run.opened import divided, open_corpus
from meshwright.run.reports import Told
from meshwright.run.swarm.driver import Swarmed, SwarmTrainer
from meshwright.run.swarm.stage import alone_at, whole_of
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.simulate.swarm import SwarmRun, SwarmSizes, SwarmWorld, simulate_swarm
from meshwright.simulate.swarm_sizes import decider_of
from meshwright.timeline import pack, unpack
from meshwright.world.swarm import Swarm


def train(job: Job, world: SwarmWorld, on_step: Told | None = None) -> dict[str, Any]:
    """Train a job whose stages are pools of peers, to its last step or until it is asked to end; a
    :class:`~meshwright.run.job.RunSummary` as plain values, and under ``swarm`` what peers did. `on_step` is called
    with every step's report, and ends the run in order by returning True.

    Raises:
        MeshwrightError: as :func:`meshwright.run.loop.train`.
        RankDied: L001 where the last peer of a stage has died.
    """
    torch.set_num_threads(1)  # peers are forked from here
    plan, decider = whole_of(job.plan), decider_of(job.plan, job.train)
    place = alone_at(plan, 0)
    alone = World(0, 1, 0, 1, socket.gethostname(), place.device)
    corpus = open_corpus(alone, job, place)
    whole = Trainer(job.model, plan, job.train, place, settings=job.settings)
    corpus, held = divided(job, corpus, alone, place)
    begin(job, whole)
    before = {number: signal.signal(number, launch.stop) for number in launch.ASKING}
    try:
        with (
            closing(Swarmed(job, decider, world, whole, corpus)) as swarm,
            closing(RankRun(job, SwarmTrainer(whole, swarm), corpus, held, on_step)) as run,
        ):
            run.steps()
            found = msgspec.to_builtins(run.summary(None, judged=run.judged))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return with_peers(found, swarm.peak_bytes) | {"swarm": _told(swarm, decider, world, found["step_s"])}


def with_peers(summary: dict[str, Any], peak_bytes: dict[int, int]) -> dict[str, Any]:
    """The summary with the memory that the peers held, by their numbers."""
    peaks = [peak_bytes[number] for number in sorted(peak_bytes)]
    timeline = unpack(msgspec.convert(summary["timeline"], bytes))
    ranks = {"rank": np.arange(len(peaks)), "peak_bytes": np.array(peaks, np.int64)}
    timeline = msgspec.structs.replace(timeline, records=timeline.records | {"rank": ranks})
    return summary | {"timeline": msgspec.to_builtins(pack(timeline)), "peak_bytes": peaks}


def _told(swarm: Swarmed, decider: Swarm, world: SwarmWorld, step_s: list[float]) -> dict[str, Any]:
    """Tell what peers did, beside the same world simulated with this run's own seconds of passes, sums and updates."""
    steps = max(1, len(step_s))
    again = _simulated(swarm, decider, world, len(step_s)) if step_s else None
    return {
        "passes": [swarm.passes[number] for number in range(len(decider.stage_of))],
        "stages": [swarm.stage_of[number] for number in range(len(decider.stage_of))],
        "lost": swarm.crowd.lost,
        "joined": swarm.crowd.joined,
        "moved": swarm.moved,
        "again": swarm.again,
        "sent_bytes": swarm.sent_bytes / steps,
        "sum_s": fmean(swarm.sum_s) if swarm.sum_s else 0.0,
        "seconds": sum(step_s),
        "simulated_s": sum(again.step_s) if again is not None else 0.0,
        "simulated_bytes": again.sent_bytes if again is not None else 0.0,
        "log": msgspec.to_builtins(swarm.log),
    }


def _simulated(swarm: Swarmed, decider: Swarm, world: SwarmWorld, steps: int) -> SwarmRun | None:
    """The same world on the virtual clock; None where it does not come to its end there."""
    stages, peers = decider.stages, len(decider.stage_of)
    passes = [tuple(median(swarm.seconds[stage, way] or [0.0]) for stage in range(stages)) for way in (False, True)]
    sums = median(swarm.sum_s) if swarm.sum_s else 0.0
    sizes = SwarmSizes(
        forward_s=(passes[0],) * peers,
        backward_s=(passes[1],) * peers,
        message_s=(0.0,) * peers,
        message_bytes=swarm.message_bytes,
        code_s=0.0,
        sum_s=((sums,) * (peers + 1),) * stages,
        update_s=((median(swarm.update_s or [0.0]),) * stages,) * peers,
        state_s=(0.0,) * stages,
    )
    try:
        return simulate_swarm(sizes, decider, world, steps)
    except MeshwrightError:  # peers are lost at other passes there, and with them a stage
        return None
