"""A run whose experts peers have: a run of one rank like any other, whose mixtures ask."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from statistics import median
from typing import Any

import msgspec
import torch

from meshwright.run import launch
from meshwright.run.begin import begin
from meshwright.run.dmoe.asking import AskedPeers, AskingTrainer
from meshwright.run.dmoe.experts import HeldExperts
from meshwright.run.job import Job
from meshwright.run.loop import RankRun
from meshwright.run.opened import divided, open_corpus
from meshwright.run.reports import Told
from meshwright.run.swarm.stage import alone_at
from meshwright.run.swarm.train import with_peers
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.simulate.asked import AskedSizes, simulate_asked
from meshwright.simulate.swarm import SwarmRun, SwarmWorld


def train(job: Job, world: SwarmWorld, on_step: Told | None = None) -> dict[str, Any]:
    """Train a job whose experts peers have, to its last step or until it is asked to end; a
    :class:`~meshwright.run.job.RunSummary` as plain values, and under ``swarm`` what peers did. `on_step` is called
    with every step's report, and ends the run in order by returning True. No gradient is clipped: nobody knows its
    length when experts take their steps.

    Raises:
        MeshwrightError: as :func:`meshwright.run.loop.train`.
        RankDied: L001 where a peer ends before it has its experts.
    """
    torch.set_num_threads(1)  # peers are forked from here
    job = msgspec.structs.replace(job, settings=msgspec.structs.replace(job.settings, clip=0.0))
    place = alone_at(job.plan, 0)
    alone = World(0, 1, 0, 1, socket.gethostname(), place.device)
    corpus = open_corpus(alone, job, place)
    whole = Trainer(job.model, job.plan, job.train, place, settings=job.settings)
    kept = {one.layer: HeldExperts((one.up, one.down), whole.types, job) for one in whole.routers}
    trainer = AskingTrainer(whole, kept)
    corpus, held = divided(job, corpus, alone, place)
    begin(job, trainer)
    before = {number: signal.signal(number, launch.stop) for number in launch.ASKING}
    try:
        with closing(AskedPeers(job, world, kept, trainer.updates)) as peers:
            trainer.ask(peers)
            with closing(RankRun(job, trainer, corpus, held, on_step)) as run:
                run.steps()
                found = msgspec.to_builtins(run.summary(None, judged=run.judged))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return with_peers(found, peers.peak_bytes) | {"swarm": _told(peers, trainer, world, found["step_s"])}


def _told(peers: AskedPeers, trainer: AskingTrainer, world: SwarmWorld, step_s: list[float]) -> dict[str, Any]:
    """Tell what peers did, beside the same world simulated with this run's own seconds of passes, messages and
    steps."""
    steps = max(1, len(step_s))
    again = _simulated(peers, trainer, world, step_s) if step_s else None
    return {
        "passes": [peers.passes[number] for number in peers.every],
        "stages": [0 if number in peers.there else -1 for number in peers.every],
        "lost": peers.crowd.lost,
        "joined": peers.crowd.joined,
        "moved": 0,
        "again": 0,
        "left_out": peers.left_out / max(1, peers.asked),
        "sent_bytes": peers.sent_bytes / steps,
        "sum_s": 0.0,
        "seconds": sum(step_s),
        "simulated_s": sum(again.step_s) if again is not None else 0.0,
        "simulated_bytes": again.sent_bytes if again is not None else 0.0,
    }


def _simulated(peers: AskedPeers, trainer: AskingTrainer, world: SwarmWorld, step_s: list[float]) -> SwarmRun:
    """The same world on the virtual clock; what this rank did while it waited for nobody is its forward."""
    plan, model, number = trainer.plan, trainer.model, len(peers.every)
    layers, microbatches = len(peers.kept), plan.num_microbatches(trainer.train.global_batch)
    forward, backward = (median(peers.seconds[way] or [0.0]) for way in (False, True))
    update = median(peers.update_s or [0.0])
    message = max(0.0, median(peers.messages_s or [0.0])) / (number + 1)  # one to each, and the last one's answer
    tokens = trainer.hidden_states()
    rows = [tokens.numel() * model.block(at).mlp.top_k * tokens.itemsize for at in sorted(peers.kept)]
    own = max(0.0, sum(step_s) - peers.waited_s) / len(step_s) / microbatches
    sizes = AskedSizes(
        microbatches=microbatches,
        forward_s=own / 3,
        backward_s=own * 2 / 3,
        update_s=0.0,
        message_bytes=tuple(map(float, rows)),
        message_s=((message,) * layers,) * number,
        experts_forward_s=((forward,) * layers,) * number,
        experts_backward_s=((backward,) * layers,) * number,
        experts_update_s=((update,) * layers,) * number,
        state_s=(0.0,) * number,
    )
    return simulate_asked(sizes, peers.wait_s, world, len(step_s))
