"""Checkpoints of a server and its clients while they go on: a distributed snapshot (Chandy & Lamport 1985).

When the server has decided what follows a version, it notes where it stands, and sends a word to every client behind
all that it has sent before. A client that comes to the word, between two steps of a task or two tasks, copies what it
holds, and its last answer: what the server had not seen of it is sent once more by a run that goes on. Nobody waits for
another. Copies are written by threads; when all are on the disk the checkpoint takes its name in one rename.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from meshwright.errors import MeshwrightError
from meshwright.run.checkpoint.commit import commit
from meshwright.run.checkpoint.format import HIDDEN, Meta
from meshwright.run.checkpoint.saving import cannot, diagnostics, sweep
from meshwright.run.checkpoint.write import shapes, write_rank
from meshwright.run.mail import WRITTEN, Gone, Letter
from meshwright.run.pieces import CLIENT, PARAM, Parameter, Part, TensorPiece, job_state
from meshwright.sync.clients import ClientDecision
from meshwright.sync.merged import ALL_TASKS

if TYPE_CHECKING:
    from queue import SimpleQueue

    from meshwright.run.client import ClientLoop
    from meshwright.run.client_server import ServerLoop
    from meshwright.run.flat import Flat
    from meshwright.run.trainer import Trainer


class LetterHead(msgspec.Struct, frozen=True):
    """A letter without its bytes, and how many those are; -1 for one without any."""

    kind: int
    client: int
    task: int
    steps: int
    note: float
    heads: int = 0
    num_bytes: int = -1

    @classmethod
    def of(cls, letter: Letter) -> LetterHead:
        return cls(*letter[:-1], -1 if letter.body is None else len(letter.body))

    def letter(self, body: torch.Tensor | None = None) -> Letter:
        return Letter(self.kind, self.client, self.task, self.steps, self.note, self.heads, body)


class ClientStands(msgspec.Struct, frozen=True):
    """Where a client stands: the steps that it has done in all, the task it is at with the losses of its steps so far,
    its last answer, and the names of the tensors that go with these; the heads that it trains, and since which step it
    has moments of theirs."""

    steps: int
    task: LetterHead | None
    losses: list[float]
    answer: LetterHead | None
    tensors: dict[str, int]
    heads: int = 0
    since: int = 0


class GivenTask(msgspec.Struct, frozen=True):
    """A task that the server gave: its version, when, and the number of the model that it began with."""

    task: int
    version: int
    at_s: float
    model: int


class ServerStands(msgspec.Struct, frozen=True):
    """Where the server stands: its decider's state, decisions that are still to be done, what is counted, what it waits
    for, whose tasks are not answered, what arrived and waits to be merged, whose gradients it keeps, and of how many
    models these are, the present one first; the tasks of jobs that have begun, which of them is at work, and whose
    models are kept."""

    state: Any
    pending: list[ClientDecision]
    versions: int
    merged: int
    left: int
    down_bytes: int
    up_bytes: int
    at_s: float
    wakes: list[tuple[float, int]]
    given: dict[int, GivenTask]
    working: list[int]
    arrived: list[tuple[LetterHead, GivenTask]]
    kept: list[int]
    models: int
    masked: bool
    job: int = ALL_TASKS
    tasks: dict[int, tuple[int, ...]] = {}
    jobs: list[int] = []


class CrowdStands(msgspec.Struct, frozen=True):
    """Where a server and its clients stand."""

    server: ServerStands
    clients: list[ClientStands]


def run_of(name: str, values: torch.Tensor) -> TensorPiece:
    """A run of values, or of bytes, that is no parameter, as a piece of a checkpoint."""
    size = len(values)
    parameter = Parameter(name, (size,), (Part(name, (size,), (0,), (slice(0, size),)),))
    return TensorPiece(CLIENT, parameter, 0, size, values, True)


def pieces_of(trainer: Trainer, client: int) -> list[TensorPiece]:
    """Parameters, running statistics and moments of a client; of the first moments are under their own name, for plans
    without clients, and statistics under theirs too."""
    found = [
        p if client == 0 and p.key != PARAM else p._replace(key=f"{p.key}@client-{client}") for p in trainer.pieces()
    ]
    return [*found, *trainer.statistics.pieces(apart=True)] if client == 0 else found


def served(trainer: Trainer, flat: Flat) -> list[tuple[TensorPiece, slice]]:
    """The parameters that every plan knows, each with where its values lie in the server's model."""
    found = [p for p in trainer.pieces() if p.key == PARAM and p.values.data_ptr() in flat.places]
    places = [flat.places[p.values.data_ptr()] for p in found]
    return [(p, slice(place, place + len(p.values))) for p, place in zip(found, places)]


def tensors_of(client: ClientLoop) -> dict[str, torch.Tensor]:
    """The tensors that a client has besides its parameters and moments."""
    corrected, mask = client.corrected, None if client.pruned is None else client.pruned.model.mask
    found = {
        "begun": None if client.working is None else client.begun,
        "lost": client.flat.lost,
        "direction": corrected.direction,
        "before": corrected.before,
        "affinity": None if client.working is None or client.merged is None else client.merged.affinity,
        "mask": None if mask is None else mask.to(torch.uint8),
        "answer": None if client.working is not None or client.answer is None else client.answer.body,
    }
    return {name: values for name, values in found.items() if values is not None}


def of_job(model: list[tuple[TensorPiece, slice]], job: int, values: torch.Tensor) -> list[TensorPiece]:
    """The parameters of one of several jobs; `model` as of :func:`served`."""
    return [p._replace(key=job_state(job), values=values[where]) for p, where in model]


class ClientSaver:
    """Writes what a client is into checkpoints below a folder, in a thread; that it is there comes to its `inbox`."""

    def __init__(self, root: Path, inbox: SimpleQueue[Letter | Gone]):
        self.root, self.inbox, self.writing = root, inbox, False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, client: ClientLoop, said: Letter) -> None:
        """Copy what a client is, and begin to write it."""
        self.writing, extra = True, tensors_of(client)
        answered = client.working is None and client.answer is not None
        stands = ClientStands(
            steps=client.trainer.step_count,
            task=None if client.working is None else LetterHead.of(client.working[0]),
            losses=[] if client.working is None else list(client.working[1]),
            answer=LetterHead.of(client.answer) if answered else None,
            tensors={name: len(values) for name, values in extra.items()},
            heads=0 if client.merged is None else client.merged.heads,
            since=0 if client.merged is None else client.merged.since,
        )
        some = [run_of(f"client-{client.client}/{name}", values) for name, values in extra.items()]
        copies = _copies([*pieces_of(client.trainer, client.client), *some])
        body = torch.frombuffer(bytearray(msgspec.json.encode(stands)), dtype=torch.uint8)
        letter = Letter(WRITTEN, client.client, said.task, body=body)
        self.thread.submit(self._write, folder_of(self.root, said.task), client.client, copies, letter)

    def _write(self, folder: Path, rank: int, copies: list[tuple[TensorPiece, torch.Tensor]], done: Letter) -> None:
        try:
            _written(folder, rank, copies)
            self.inbox.put(done)
        except BaseException as error:
            self.inbox.put(Gone(MeshwrightError(diagnostics(error, folder, rank))))


class ServerSaver:
    """Saves checkpoints of a server and `count` clients below a folder that all see, the newest `keep`: at the end, and
    where a step is a multiple of `every`, 0 for never. A step is one of each client, of those that are merged. One that
    is due while another is under way is left out. `model`: :func:`served`."""

    def __init__(
        self, root: Path, count: int, every: int, keep: int, meta: Meta, model: list[tuple[TensorPiece, slice]]
    ):
        self.root, self.count, self.every, self.keep, self.meta, self.model = root, count, every, keep, meta, model
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="server's checkpoint")
        self.number, self.saved, self.last = 0, "", meta.step
        self.meant: Meta | None = None
        self.stands: ServerStands | None = None
        self.clients: dict[int, ClientStands] = {}
        self.copies: list[tuple[TensorPiece, torch.Tensor]] = []
        self.committing: Future | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            sweep(root)
        except OSError as error:
            raise MeshwrightError([cannot(root, error, 0)]) from None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be begun at a step."""
        self.poll()
        return bool(self.every) and self.stands is None and step // self.every > self.last // self.every

    def begin(self, server: ServerLoop, step: int) -> int:
        """Note where the server stands; the number of the checkpoint, by which clients are told."""
        self.number, self.last, self.clients = self.number + 1, step, {}
        self.meant = msgspec.structs.replace(self.meta, step=step)
        self.stands, tensors = standing(server)
        shown = server.model if not self.stands.masked else server.pruned.masked(server.model)
        runs = [run_of(f"server/{name}", values) for name, values in tensors.items()]
        if server.jobs is not None:
            shown = server.jobs.all(server.model)[0][1]
            kept = server.jobs.models | {server.jobs.job: server.model}
            runs += [one for job, model in kept.items() for one in of_job(self.model, job, model)]
        pieces = [*(piece._replace(values=shown[where]) for piece, where in self.model), *runs]
        self.copies = [(piece, piece.values) for piece in pieces]  # the server changes no tensor in place
        return self.number

    def take(self, letter: Letter) -> None:
        """A client is on the disk; when the last is, the checkpoint gets its name."""
        self.clients[letter.client] = msgspec.json.decode(letter.body.numpy().tobytes(), type=ClientStands)
        if len(self.clients) == self.count:
            stands = CrowdStands(self.stands, [self.clients[client] for client in range(self.count)])
            self.committing = self.thread.submit(self._commit, self.number, stands, self.meant, self.copies)

    def _commit(
        self, number: int, stands: CrowdStands, meant: Meta, copies: list[tuple[TensorPiece, torch.Tensor]]
    ) -> str:
        folder = folder_of(self.root, number)
        try:
            _written(folder, self.count, [(p, v.cpu().contiguous()) for p, v in copies])
            extra = self.meta.extra | {"clients": msgspec.to_builtins(stands, str_keys=True)}
            return str(
                commit(self.root, folder, msgspec.structs.replace(meant, extra=extra), self.count + 1, self.keep)
            )
        except BaseException as error:
            raise MeshwrightError(diagnostics(error, folder, 0)) from None

    def poll(self, *, wait: bool = False) -> None:
        """See whether the checkpoint under way is complete.

        Raises:
            MeshwrightError: H005 when it could not be written.
        """
        if self.committing is None or not (wait or self.committing.done()):
            return
        done, self.committing, self.stands, self.copies = self.committing, None, None, []
        self.saved = done.result()


def standing(server: ServerLoop) -> tuple[ServerStands, dict[str, torch.Tensor]]:
    """Where a server stands, and its tensors by name."""
    models: list[torch.Tensor] = [server.model]

    def given(one: Any) -> GivenTask:
        number = next((i for i, model in enumerate(models) if model is one.start), len(models))
        if number == len(models):
            models.append(one.start)
        return GivenTask(one.task, one.version, one.at_s, number)

    working = sorted(server.working)
    arrived = [(LetterHead.of(letter), given(one)) for letter, one in server.arrived.values()]
    mask = None if server.pruned is None else server.pruned.mask
    stands = ServerStands(
        state=msgspec.to_builtins(server.state, str_keys=True),
        pending=list(server.pending),
        versions=server.first + len(server.versions),
        merged=server.merged,
        left=server.left,
        down_bytes=server.down_bytes,
        up_bytes=server.up_bytes,
        at_s=server.now_s(),
        wakes=list(server.wakes),
        given={client: given(server.given[client]) for client in working},
        working=working,
        arrived=arrived,
        kept=sorted(server.kept),
        models=len(models),
        masked=mask is not None,
        job=ALL_TASKS if server.jobs is None else server.jobs.job,
        tasks={} if server.jobs is None else dict(server.jobs.tasks),
        jobs=[] if server.jobs is None else sorted(server.jobs.models),
    )
    tensors = {f"model-{number}": model for number, model in enumerate(models)}
    tensors |= {f"kept-{client}": values for client, values in sorted(server.kept.items())}
    bodies = [letter.body for letter, _ in server.arrived.values()]
    tensors |= {f"answer-{number}": body for number, body in enumerate(bodies) if body is not None}
    if mask is not None:
        tensors["mask"] = mask.to(torch.uint8)
    return stands, tensors


def folder_of(root: Path, number: int) -> Path:
    """The hidden folder of a run's checkpoint while it is being written."""
    return root / f"{HIDDEN}{number:08d}.clients.part"


def _copies(pieces: Iterable[TensorPiece]) -> list[tuple[TensorPiece, torch.Tensor]]:
    return [(piece, piece.values.detach().to("cpu", copy=True).contiguous()) for piece in pieces]


def _written(folder: Path, rank: int, copies: list[tuple[TensorPiece, torch.Tensor]]) -> None:
    write_rank(folder, rank, copies, shapes([piece for piece, _ in copies]))


def note_world(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say where clients of a run that goes on differ otherwise than those that it was begun with."""
    changed = [f"{name}={now[name]}, before {before[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        print(f"the world is another one than the checkpoint's: {'; '.join(changed)}", file=sys.stderr)
