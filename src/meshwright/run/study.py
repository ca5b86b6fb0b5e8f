"""A study of convergence: every sync policy trained on the same text for equal tokens, or on the same labelled samples
for equally many of them, with several seeds.

Runs are jobs of :mod:`meshwright.run.loop` one after another, in real processes. Each leaves its result in the study's
folder; the same study goes on where it was left, and one that asks for more policies or seeds adds to it.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, parse
from meshwright.run import clients, data, launch, loop
from meshwright.run.begin import checkpoints
from meshwright.run.metrics import METRICS
from meshwright.run.settings import Settings
from meshwright.spec.architecture import Model
from meshwright.spec.workload import Train
from meshwright.sync.losses import TrainedLoss, rated, sync_of, words_of, workload
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL
from meshwright.sync.studies import QUESTION, RESULT, RUNS, results
from meshwright.world.crowd import Crowd
from meshwright.world.trace import JobWorld
from meshwright.world.trace import read as read_world

FORMAT_VERSION = 1
#: The share of the text that losses are measured on.
HELD_OUT = 0.05
#: The weight decay of language models.
DECAY = Settings().weight_decay
#: Times that a run is judged.
JUDGED = 2
#: The code of a run whose loss was not a number.
DIVERGED = "L004"


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Policies to train, or ways of feedback under the usual one, for each number of ``steps``, and the usual one for
    those of the ``ladder`` besides, so that a loss can be read as tokens. A policy may say a learning rate of its own
    behind an @, as ``dist-lion@3e-4``, and is trained with the optimizer that it is of, if it is of one. ``warmup`` is
    a share of a run's steps; the rate then falls along a cosine to a tenth.
    ``corpus`` is the folder of the tokenised text, ``text`` what was said of it, ``digest`` its contents'. ``world``
    are words of how clients differ, for policies of clients, or of faulty workers, for all."""

    model: Model
    train: Train
    replicas: int
    policies: tuple[str, ...]
    steps: tuple[int, ...]
    seeds: int
    lr: float
    warmup: float
    text: str
    corpus: str
    digest: str
    ladder: tuple[int, ...] = ()
    device: str = "cpu"
    world: str = ""
    weight_decay: float = DECAY

    def plan(self, policy: str) -> Plan:
        """The plan of a run: one replica a process."""
        return parse(f"dp{self.replicas} mb{self.workload(policy).global_batch // self.replicas} {words_of(policy)}")

    def steps_of(self, policy: str, steps: int) -> int:
        """Steps of a run that trains on as much as so many steps of the study's batch."""
        return steps * self.train.global_batch // self.workload(policy).global_batch

    def workload(self, policy: str) -> Train:
        """The workload of a run: with the optimizer that the policy is of."""
        return workload(self.train, policy)

    @property
    def judged_from(self) -> int:
        """The first tokens of sequences that no policy is judged by, as some route by them."""
        paths = (read(sync_of(policy)).paths for policy in self.policies)
        return max((one.prefix for one in paths if one is not None), default=0)

    def same(self) -> dict[str, Any]:
        """Return what all results of a folder have in common, as plain values."""
        said = {name: getattr(self, name) for name in ("replicas", "lr", "warmup", "digest")}
        said |= {"judged_from": self.judged_from} if self.judged_from else {}
        said |= {"world": self.world} if self.world else {}
        said |= {"weight_decay": self.weight_decay} if self.weight_decay != DECAY else {}
        found = {"model": self.model.name, "params": self.model.num_params, "train": self.train.text()}
        return {"format_version": FORMAT_VERSION, **found, **said, "text": self.text}


class Trial(NamedTuple):
    """One run of a study."""

    policy: str
    steps: int
    seed: int

    @property
    def folder(self) -> str:
        """A name that any file system takes, of this run alone."""
        mark = hashlib.sha256(self.policy.encode()).hexdigest()[:6]
        plain = "".join(c if c.isalnum() else "-" for c in self.policy)[:40]
        return f"{plain}-{mark}-steps{self.steps}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.policy}, {self.steps:,} steps, seed {self.seed}"


class StudyProgress(NamedTuple):
    """How far a study is: runs done and in all, the run that was done last with its loss, seconds it took."""

    done: int
    total: int
    trial: Trial
    loss: float
    seconds: float


def trials(study: Study) -> Iterator[Trial]:
    """Every run, seed by seed, so that a study that is cut short compares all policies all the same."""
    for seed in range(study.seeds):
        for steps in sorted({*study.steps, *study.ladder}):
            yield Trial(USUAL, steps, seed)
        for policy in study.policies:
            if policy != USUAL:
                yield from (Trial(policy, steps, seed) for steps in study.steps)


def begin(study: Study, out: Path) -> None:
    """Make the study's folder, or find that it holds the same study.

    Raises:
        MeshwrightError: L005 when it is another's, X104 when it cannot be written.
    """
    file, said = out / QUESTION, study.same()
    if file.is_file():
        try:
            before = msgspec.json.decode(file.read_bytes())
        except (OSError, msgspec.DecodeError):
            before = None
        if before != msgspec.json.decode(msgspec.json.encode(said)):
            other = "is no study's" if not isinstance(before, dict) else _differs(before, said)
            raise MeshwrightError.one(
                "L005",
                f"the folder holds another study: {other}",
                place=f"--out {out}",
                help="name another folder, or ask the same of this one",
            )
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(file, msgspec.json.format(msgspec.json.encode(said), indent=2))
    except OSError as error:
        raise MeshwrightError.one(
            "X104",
            f"cannot write {file}: {error.strerror or error}",
            place=f"--out {out}",
            help="name a folder that may be written to",
        ) from None


def _differs(before: dict[str, Any], said: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} is {before.get(key)!r}, not {value!r}" for key, value in said.items() if before.get(key) != value
    )


def conduct(study: Study, out: Path, said: Callable[[StudyProgress], None], *, quiet: bool = True) -> bool:
    """Train what is not done yet, and tell `said` after every run; False when it was asked to end before the last."""
    every = list(trials(study))
    known = {(row.policy, row.steps, row.seed) for row in results(out)}
    for number, trial in enumerate(every, 1):
        if tuple(trial) in known:
            continue
        begun = time.monotonic()
        row = _trained(study, trial, out / RUNS / trial.folder, quiet)
        if row is None:
            return False
        said(StudyProgress(number, len(every), trial, row.loss, time.monotonic() - begun))
    return True


def _trained(study: Study, trial: Trial, folder: Path, quiet: bool) -> TrainedLoss | None:
    """The result of one run, which is in its folder; None when it was asked to end."""
    steps, world = study.steps_of(trial.policy, trial.steps), read_world(study.world) if study.world else JobWorld()
    job = loop.Job(
        model=study.model,
        plan=study.plan(trial.policy),
        train=study.workload(trial.policy),
        settings=Settings(
            seed=trial.seed,
            lr=rated(trial.policy)[1] or study.lr,
            warmup=math.ceil(study.warmup * steps),
            decay_steps=steps,
            weight_decay=study.weight_decay,
        ),
        text=study.text,
        corpus=study.corpus,
        steps=steps,
        out=str(folder),
        resume=bool(checkpoints(str(folder))),
        quiet=quiet,
        judged_every=max(1, steps // JUDGED),
        held_out=HELD_OUT,
        judged_from=study.judged_from,
        faulty=world.faulty,
    )
    loss, sent, accuracy = math.inf, math.nan, None
    served = read(job.plan.sync.policy).rule.decider is not None
    try:
        how = {"num_ranks": job.plan.num_ranks, "device": study.device, "stops": True}
        if served:
            summary = launch.start(clients.train, job, world.clients or Crowd(), **how)
        else:
            summary = launch.start(loop.train, job, **how)
    except MeshwrightError as error:
        if all(d.code != DIVERGED for d in error.diagnostics):
            raise
    else:
        if summary["stopped"]:
            return None
        tokens = job.train.tokens_per_step / study.replicas
        if served:  # judged once, at the end; what all clients sent and got, over all that went into the model
            did, (loss,) = summary["clients"], summary["judged"].values()
            accuracy = next(iter(summary["accuracy"].values()), None)
            sent = (did["down_bytes"] + did["up_bytes"]) / max(1, did["merged"]) / tokens
        else:
            loss, accuracy = _final(folder, steps)
            sent = sum(ring(*one) for one in summary["exchanged"]) / max(1, len(summary["step_s"])) / tokens
    row = TrainedLoss(
        policy=trial.policy,
        seed=trial.seed,
        steps=trial.steps,
        tokens=trial.steps * study.train.tokens_per_step,
        loss=loss,
        sent_per_token=0.0 if math.isnan(sent) else sent,
        accuracy=accuracy,
    )
    write_bytes(folder / RESULT, msgspec.json.encode(row))
    for checkpoint in checkpoints(str(folder)):  # the run is over: nothing goes on from it
        shutil.rmtree(checkpoint, ignore_errors=True)
    return row


def _final(folder: Path, steps: int) -> tuple[float, float | None]:
    """The held-out loss and accuracy after the last step, from the run's metrics."""
    for line in reversed((folder / METRICS).read_bytes().splitlines()):
        entry = msgspec.json.decode(line)
        if entry["step"] == steps and "held_out_loss" in entry:
            return entry["held_out_loss"], entry.get("held_out_accuracy")
    return math.inf, None


def ring(kind: str, ranks: int, num_bytes: float) -> float:
    """Bytes that a rank sends of a collective around a ring, or of a message: a sum passes twice, and of a gather or a
    scatter each rank keeps one share."""
    others = 1 - 1 / ranks if ranks > 1 else 0.0
    return num_bytes * {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others}.get(kind, 1.0)


def policies_that_grow(policies: tuple[str, ...]) -> list[str]:
    """Policies whose rounds grow as a learning rate of their own falls."""
    return [policy for policy in policies if read(sync_of(policy)).growth is not None]


def unjoined(policies: tuple[str, ...], steps: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Policies whose rounds do not end with the last step: (policy, steps of a round, steps)."""
    when = {policy: read(sync_of(policy)).when for policy in policies}
    return [(policy, every, count) for policy, every in when.items() for count in steps if count % every]


def opened(text: str, words: str, train: Train, model: Model, world: str = "") -> tuple[str, str]:
    """The folder of the tokenised text, or of labelled samples, and a digest of its contents, once it is known to
    suffice.

    Raises:
        MeshwrightError: D codes for the text, D005 also where what is held out is less than a batch; D013 for uneven
            classes of samples that say whose each is.
    """
    from meshwright.run.data import tokenizer

    folder = data.build(text, tokenizer.load(words), data.cache_folder())
    place = f"--data {text}"
    corpus = data.load(folder, train, vocab=model.vocab, model=model, place=place)
    skewed = read_world(world).clients if world else None
    if skewed is not None and skewed.skew and getattr(corpus, "clients", None) is not None:
        help = "drop skew= of --world"
        raise MeshwrightError.one("D013", "the samples say whose each is (clients [N])", place=place, help=help)
    try:
        data.held_out(corpus, HELD_OUT)
    except ValueError as error:
        if isinstance(corpus, data.LabelledSamples):
            message, help = f"there are too few samples: {error}", "more of them, or a smaller batch"
            raise MeshwrightError.one("D005", message, place=place, help=help) from None
        raise MeshwrightError.one(
            "D005",
            f"the text is too short: {HELD_OUT:.0%} of its {corpus.num_sequences:,} sequences are held out to judge by "
            f"and do not fill a batch of {train.global_batch} sequences of {train.seq_len}",
            place=place,
            help="more text, or a smaller batch or seq",
        ) from None
    return str(folder), data.digest(text)[:16]
