"""Clients of a server as real processes: the deciders of ``sync/clients`` on a real clock.

Every rank is a client (:mod:`meshwright.run.client`); the server (:mod:`meshwright.run.client_server`) is a thread
beside the first one. Its decider is the one that ``simulate/clients.py`` drives with predicted times. Afterwards the
same world is simulated with the times that this run's steps and messages took, and laid beside it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from meshwright.answer.clients import alike_in_data
from meshwright.errors import MeshwrightError
from meshwright.run import mesh
from meshwright.run.begin import begin
from meshwright.run.between import Aggregator
from meshwright.run.client import ClientLoop
from meshwright.run.client_resume import going_on, prepared, taken_up
from meshwright.run.client_server import ServerLoop
from meshwright.run.coded_parts import CodedParts
from meshwright.run.data import Corpus, MixedText
from meshwright.run.flat import Flat
from meshwright.run.job import Job, RunSummary
from meshwright.run.judge import Judge
from meshwright.run.mail import Gone, Letter, Post
from meshwright.run.merged_tasks import JobModels, Jobs, TaskSteps, TaskValues, everywhere, judged
from meshwright.run.opened import divided, open_corpus
from meshwright.run.pruned import PrunedModel, PrunedSteps
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.simulate.clients import ClientSizes, simulate_clients
from meshwright.sync.policy import read
from meshwright.timeline import Timeline
from meshwright.world.crowd import Crowd


def train(world: World, job: Job, clients: Crowd) -> dict[str, Any]:
    """The rank `world` of a run of clients; on rank 0 a :class:`RunSummary` of versions as plain values, with what
    clients did under ``clients``.

    Raises:
        MeshwrightError: D codes for the data, H codes for weights, X104 for the metrics; the same on every rank.
    """
    place = mesh.build(job.plan, device=world.device)
    corpus = open_corpus(world, job, place)
    if isinstance(corpus, MixedText):
        help = "name one text: each client has a run of it"
        raise MeshwrightError.one("D009", "clients share out one text, not a mixture", place="--data", help=help)
    corpus, text = divided(job, corpus, world, place)
    policy, count = read(job.plan.sync.policy), place["dp"].size
    alike_in_data(policy, clients)
    train = msgspec.structs.replace(job.train, global_batch=policy.copies * job.train.global_batch)
    trainer = Trainer(job.model, job.plan, train, place, settings=job.settings, schedule_params=job.schedule_params)
    stands = going_on(job, trainer)
    if stands is None:
        begin(job, trainer)
    flat = Flat(trainer)
    down = [Post(client, down=True) for client in range(count)]
    tree = int(policy.values.get("tree", 1))
    leaders = range(0, count, tree) if tree > 1 else range(0)
    up = [Post(client, down=False, merger=client // tree * tree if tree > 1 else 0) for client in range(count)]
    sums = {leader: Post(leader, down=False) for leader in leaders}
    expect = {leader: Post(leader, down=True) for leader in leaders}
    between = _between(trainer, world.rank, tree, up, sums, expect)
    inbox: SimpleQueue[Letter | Gone] = SimpleQueue()
    down[world.rank].open(inbox)
    client = ClientLoop(
        world.rank, trainer, flat, corpus, clients, up[world.rank], inbox, float(policy.values.get("mu", 0.0))
    )
    if policy.copies > 1:
        client.parts = CodedParts(trainer, world.rank, count, policy.copies)
    if policy.pruning is not None:
        client.pruned = PrunedSteps(trainer, PrunedModel(trainer, flat, policy.pruning))
    if policy.merged is not None:
        client.merged = TaskSteps(trainer, TaskValues(trainer, flat, policy.merged))
    server = thread = None
    if place.first:
        mail: SimpleQueue[Letter | Gone] = SimpleQueue()
        for channel in sums.values() if sums else up:
            channel.open(mail)
        server = ServerLoop(policy.rule.decider(policy.values, count), Flat(trainer), down, mail, job.steps * count)
        server.expect, server.tree = expect, tree
        if policy.pruning is not None:
            server.pruned = PrunedModel(trainer, server.flat, policy.pruning)
        if policy.merged is not None:
            server.jobs = JobModels(TaskValues(trainer, server.flat, policy.merged))
    taken_up(job, trainer, client, server, stands)
    prepared(job, trainer, client, server, clients)
    if server is not None:
        thread = threading.Thread(target=server.run, name="server", daemon=True)
        thread.start()
    client.run()
    if between is not None:
        between.thread.join()
        if between.wrong is not None:
            raise between.wrong
    if server is not None:
        thread.join()
        for channel in sums.values() if sums else up:
            channel.close()
        if server.wrong is not None:
            raise server.wrong
    down[world.rank].close()
    return _finished(job, trainer, flat, client, server, clients, text)


def _between(
    trainer: Trainer, rank: int, tree: int, up: list[Post], sums: dict[int, Post], expect: dict[int, Post]
) -> Aggregator | None:
    """The aggregator of this rank, at work; None where it has none."""
    if rank not in sums:
        return None
    inbox: SimpleQueue[Letter | Gone] = SimpleQueue()
    for channel in (*up[rank : rank + tree], expect[rank]):
        channel.open(inbox)
    found = Aggregator(Flat(trainer), tree, sums[rank], inbox)
    found.thread.start()
    return found


def _finished(
    job: Job,
    trainer: Trainer,
    flat: Flat,
    client: ClientLoop,
    server: ServerLoop | None,
    clients: Crowd,
    text: Corpus | None,
) -> dict[str, Any]:
    """Give every rank the server's model, judge it by held-out `text`, and tell what was done."""
    place = trainer.mesh
    model = flat.values() if server is None else server.model.clone()
    if server is not None and server.pruned is not None and server.pruned.mask is not None:
        model = server.pruned.masked(model)
    merged, jobs = read(job.plan.sync.policy).merged, []
    if merged is not None:
        jobs = everywhere(None if server is None else server.jobs.all(server.model), trainer, merged, model)
        model = jobs[0][1]
    elif place.world > 1:
        dist.broadcast(model, 0)
    flat.take(model)
    trainer.publish()
    trainer.settle()
    took = [fmean(client.step_s) if client.step_s else 0.0, float(len(client.step_s))]
    every = [torch.zeros(2, dtype=torch.float64, device=place.device) for _ in range(place.world)]
    if place.world > 1:
        dist.all_gather(every, torch.tensor(took, dtype=torch.float64, device=place.device))
    held_out, right, each = None, None, {}
    if text is not None:
        trainer.take(job.train.global_batch)  # of clients that compute parts several times over, once
        trainer.weights = ()
        judge = Judge(trainer, text, job.judged_from)
        each = judged(judge, flat, jobs)
        held_out = each[0] if each else judge.loss()
        right = judge.accuracy
    if server is None:
        return {}
    saved = "" if server.saver is None else server.saver.saved
    found = [(step_s, int(steps)) for step_s, steps in (one.tolist() for one in every)]
    summary = _summary(job, trainer, server, found, clients) | {"saved": saved}
    if merged is not None:
        summary["clients"] |= told(server, jobs, each)
    last = server.first + len(server.versions)
    summary |= {} if held_out is None else {"judged": {last: held_out}}
    return summary if right is None else summary | {"accuracy": {last: right}}


def told(server: ServerLoop, jobs: Jobs, judged: dict[int, float]) -> dict[str, Any]:
    """Tell of merged tasks: the groups, the mean affinities of rows towards columns, and losses of tasks."""
    state, many = server.state, server.jobs.values.merged.tasks
    mean = np.array(state.affinity).reshape(-1, many) / max(state.measured, 1)
    return {"groups": [list(tasks) for tasks, _ in jobs], "affinity": mean.tolist(), "judged": list(judged.values())}


def _summary(
    job: Job, trainer: Trainer, server: ServerLoop, found: list[tuple[float, int]], clients: Crowd
) -> dict[str, Any]:
    """The versions as steps of a run, and what clients did, beside the same world simulated."""
    count, versions = len(found), server.versions
    ends = np.array([v.at_s for v in versions])
    columns = {
        "step": np.arange(server.first + 1, server.first + len(versions) + 1),
        "seconds": np.diff(ends, prepend=max(server.resumed_s, 0.0)),
        "loss": np.array(server.losses, np.float64),
        "grad_norm": np.zeros(len(versions)),
        "tokens": np.array([v.steps for v in versions], np.float64) * job.train.tokens_per_step / count,
    }
    ranks = {"rank": np.arange(count), "peak_bytes": np.zeros(count, np.int64)}
    timeline = msgspec.structs.replace(Timeline.bare(identity=job.identity), records={"step": columns, "rank": ranks})
    summary = RunSummary.of(
        timeline,
        server.first + len(versions),
        device=str(trainer.mesh.device.type),
        stopped=server.merged < server.num_steps,
    )
    simulated = simulated_again(job, server, found, clients) if versions else None
    said = {
        "seconds": versions[-1].at_s - max(server.resumed_s, 0.0) if versions else 0.0,
        "simulated_s": simulated.seconds if simulated else 0.0,
        "simulated_versions": len(simulated.versions) if simulated else 0,
        "versions": [v._asdict() for v in versions],
        "steps": [steps for _, steps in found],
        "merged": server.merged - server.merged_before,
        "left": server.left,
        "down_bytes": server.down_bytes,
        "up_bytes": server.up_bytes,
        "simulated_up_bytes": simulated.up_bytes if simulated else 0,
        "step_s": [step_s for step_s, _ in found],
        "log": msgspec.to_builtins(server.log),
    }
    return msgspec.to_builtins(summary) | {"clients": said}


def simulated_again(job: Job, server: ServerLoop, found: list[tuple[float, int]], clients: Crowd) -> Any:
    """The same world on the virtual clock, with this run's own seconds of steps and messages."""
    policy, count = read(job.plan.sync.policy), len(found)
    usual = median(step_s for step_s, steps in found if steps)
    sent = median(server.sent_s) if server.sent_s else 0.0
    up_bytes, tree = sum(server.flat.wire_bytes), server.tree
    sizes = ClientSizes(
        step_s=tuple(step_s or usual for step_s, _ in found),
        pass_s=tuple(step_s or usual for step_s, _ in found),
        pruning=policy.pruning,
        prunable=0 if server.pruned is None else int(server.pruned.prunable.sum()),
        element_bytes=server.flat.dtype.itemsize,
        down_s=(0.0, *([sent] * (count - 1))),
        up_s=(0.0, *([sent * up_bytes / server.flat.model_bytes] * (count - 1))),
        down_bytes=server.flat.model_bytes,
        up_bytes=up_bytes,
        tree=tree,
        near_s=(0.0, *([sent * up_bytes / server.flat.model_bytes] * (count - 1))) if tree > 1 else (),
    )
    decider = policy.rule.decider(policy.values, count)
    if server.jobs is not None:
        values = server.jobs.values
        sizes = msgspec.structs.replace(sizes, merged=values.merged, head_bytes=values.head_bytes)
        decider = msgspec.structs.replace(decider, known=server.state.groups)
    return simulate_clients(sizes, decider, clients, max(1, server.merged - server.merged_before))
