"""Going on with a run of clients from a checkpoint of them (:mod:`meshwright.run.client_saving`): every client and the
server take up what they held, and clients go on with the tasks that the server still waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.agree import agree
from meshwright.run.begin import begin_base, checkpoints, same_adapters
from meshwright.run.checkpoint import Meta, identity, load
from meshwright.run.checkpoint.format import find, read_index
from meshwright.run.client_saving import (
    ClientSaver,
    ClientStands,
    CrowdStands,
    GivenTask,
    ServerSaver,
    ServerStands,
    note_world,
    of_job,
    pieces_of,
    run_of,
    served,
)
from meshwright.run.client_server import Given
from meshwright.run.companions import ORIGIN, origin
from meshwright.run.metrics import METRICS, Metrics
from meshwright.world.crowd import Crowd

if TYPE_CHECKING:
    from meshwright.run.client import ClientLoop
    from meshwright.run.client_server import ServerLoop
    from meshwright.run.job import Job
    from meshwright.run.pieces import TensorPiece
    from meshwright.run.trainer import Trainer


def going_on(job: Job, trainer: Trainer) -> CrowdStands | None:
    """Return where clients and their server stood when a job to go on with was saved, None where it begins; collective.

    Raises:
        MeshwrightError: Y004 for a checkpoint of other clients, or of none; L005 for another seed.
    """
    if not (job.resume and checkpoints(job.out)):
        return None
    wrong: Iterable[Diagnostic] = ()
    found = None
    try:
        meta = read_index(find(job.out)).meta
        found, wrong = _read(job, trainer, meta)
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(trainer.mesh["world"], wrong, trainer.mesh.device)
    return found


def _read(job: Job, trainer: Trainer, meta: Meta) -> tuple[CrowdStands | None, list[Diagnostic]]:
    """Where a checkpoint stands, and why it is of no use to this run."""
    place, policy, count = f"--resume {job.out}", trainer.plan.sync.policy, trainer.plan.layout.dp
    before, said = meta.extra.get("sync", "step"), meta.extra.get("clients")
    held = 0 if said is None else len(said["clients"])
    if (before, held) != (policy, count):
        has = f"{held} clients under sync={before}" if held else f"replicas under sync={before}, and no clients"
        return None, [
            Diagnostic(
                code="Y004",
                message=f"the checkpoint holds {has}, and this run has {count} clients under sync={policy}",
                place=place,
                help=f"go on with sync={before}"
                + (f" and {held} clients" if held else "")
                + ", or begin in another --out",
            )
        ]
    if meta.seed != job.settings.seed:
        message = f"the checkpoint was trained with seed {meta.seed}, and this run has {job.settings.seed}"
        return None, [Diagnostic(code="L005", message=message, place=place, help=f"--seed {meta.seed}")]
    return msgspec.convert(said, CrowdStands, str_keys=True), []


def taken_up(
    job: Job, trainer: Trainer, client: ClientLoop, server: ServerLoop | None, stands: CrowdStands | None
) -> None:
    """Fill a client, and the server beside the first, from the checkpoint; collective. Raises as
    :func:`meshwright.run.checkpoint.load`."""
    if stands is None:
        return
    place = trainer.mesh
    same_adapters(begin_base(job, trainer), job.out, place)
    mine = stands.clients[client.client]
    pieces, fill = _of_client(client, mine)
    if server is not None:
        more, filled = _of_server(trainer, server, stands.server)
        pieces += more
    load(job.out, pieces, place["world"], model_hash=identity(job.model), device=place.device)
    fill()
    trainer.set_step(mine.steps)
    if client.merged is not None:
        trainer.optimizer.set_step(mine.steps - mine.since)
    if server is not None:
        filled()


def _of_client(client: ClientLoop, stands: ClientStands) -> tuple[list[TensorPiece], Callable[[], None]]:
    """The pieces to load for a client, and what to do when they are."""
    flat, number = client.flat, client.client
    tensors = {name: _room(name, size, flat.values()) for name, size in stands.tensors.items()}
    pieces = [run_of(f"client-{number}/{name}", values) for name, values in tensors.items()]

    def fill() -> None:
        client.begun, flat.lost = tensors.get("begun"), tensors.get("lost", flat.lost)
        client.corrected.direction, client.corrected.before = tensors.get("direction"), tensors.get("before")
        if "mask" in tensors:
            client.pruned.model.mask = tensors["mask"].bool()
        if client.merged is not None:
            client.merged.take(stands.heads)
            client.merged.since, client.merged.affinity = stands.since, tensors.get("affinity")
        if stands.task is not None:
            client.working = stands.task.letter(), list(stands.losses)
        if stands.answer is not None:
            client.answer = stands.answer.letter(tensors.get("answer"))

    return [*pieces_of(client.trainer, number), *pieces], fill


def _of_server(
    trainer: Trainer, server: ServerLoop, stands: ServerStands
) -> tuple[list[TensorPiece], Callable[[], None]]:
    """The pieces to load for the server, and what to do when they are."""
    like = server.flat.values()
    models = [torch.empty_like(like) for _ in range(stands.models)]
    tensors = {f"model-{number}": model for number, model in enumerate(models)}
    tensors |= {f"kept-{client}": torch.empty_like(like) for client in stands.kept}
    tensors |= {
        f"answer-{number}": _room("answer", head.num_bytes, like)
        for number, (head, _) in enumerate(stands.arrived)
        if head.num_bytes >= 0
    }
    if stands.masked:
        tensors["mask"] = _room("mask", len(like), like)

    def given(one: GivenTask) -> Given:
        return Given(one.task, one.version, models[one.model], one.at_s)

    def fill() -> None:
        server.model, server.state = models[0], _state(server, stands.state)
        server.pending, server.wakes = tuple(stands.pending), [tuple(one) for one in stands.wakes]
        server.first, server.resumed_s = stands.versions, stands.at_s
        server.merged = server.merged_before = stands.merged
        server.left, server.down_bytes, server.up_bytes = stands.left, stands.down_bytes, stands.up_bytes
        server.working, server.given = set(stands.working), {c: given(one) for c, one in stands.given.items()}
        server.kept = {client: tensors[f"kept-{client}"] for client in stands.kept}
        for number, (head, one) in enumerate(stands.arrived):
            letter = head.letter(tensors.get(f"answer-{number}"))
            server.arrived[letter.client, letter.task] = letter, given(one)
        if stands.masked:
            server.pruned.mask = tensors["mask"].bool()
        if server.jobs is not None:
            server.jobs.job, server.jobs.tasks, server.jobs.models = stands.job, dict(stands.tasks), jobs

    jobs = {job: torch.empty_like(like) for job in stands.jobs}
    of_jobs = [one for job, model in jobs.items() for one in of_job(served(trainer, server.flat), job, model)]
    return of_jobs + [run_of(f"server/{name}", values) for name, values in tensors.items()], fill


def _state(server: ServerLoop, said: Any) -> Any:
    return msgspec.convert(said, type(server.decider.begin()), str_keys=True)


def _room(name: str, size: int, like: torch.Tensor) -> torch.Tensor:
    """Room for a tensor of this name: values as the model's, or bytes; what is sent is in host memory."""
    if name in ("answer", "affinity"):
        return torch.empty(size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8 if name == "mask" else like.dtype, device=like.device)


def prepared(job: Job, trainer: Trainer, client: ClientLoop, server: ServerLoop | None, clients: Crowd) -> None:
    """Prepare a client, and the server, to keep checkpoints and metrics where the job has a folder; collective, and the
    last before the server begins: its clock goes on from there.

    Raises:
        MeshwrightError: H005 where the folder cannot be made, X104 for the metrics.
    """
    wrong: Iterable[Diagnostic] = ()
    if job.out:
        client.saver = ClientSaver(Path(job.out), client.inbox)
        try:
            if server is not None:
                _keep(job, trainer, server, clients)
        except MeshwrightError as error:
            wrong = error.diagnostics
    agree(trainer.mesh["world"], wrong, trainer.mesh.device)
    if server is not None:
        server.begun_s = time.perf_counter() - max(server.resumed_s, 0.0)


def _keep(job: Job, trainer: Trainer, server: ServerLoop, clients: Crowd) -> None:
    """Have the server keep checkpoints and metrics."""
    world = msgspec.json.decode(msgspec.json.encode(clients))
    if server.resumed_s >= 0:
        note_world(read_index(find(job.out)).meta.extra.get("crowd", {}), world)
    meta = Meta(
        step=server.step,
        seed=job.settings.seed,
        model=job.model.name,
        model_hash=identity(job.model),
        plan=job.plan.text(),
        world=trainer.mesh.world,
        extra={
            "workload": job.train.text(),
            ORIGIN: origin(job),
            "sync": trainer.plan.sync.policy,
            "joined": True,
            "crowd": world,
        },
    )
    server.saver = ServerSaver(
        Path(job.out), trainer.mesh.world, job.save_every, job.keep, meta, served(trainer, server.flat)
    )
    if server.resumed_s >= 0:
        server.saver.saved = str(find(job.out))
    server.metrics = Metrics(Path(job.out) / METRICS, done=server.first)
