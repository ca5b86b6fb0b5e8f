"""The beginning of a run: a trainer is filled from a checkpoint to go on from, or from published weights; adapters over
their base."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from meshwright.errors import MeshwrightError
from meshwright.run.agree import agree
from meshwright.run.checkpoint import identity, load
from meshwright.run.checkpoint.format import find
from meshwright.run.checkpoint.loading import CheckpointReader
from meshwright.run.job import Job
from meshwright.run.lessons import published
from meshwright.run.lora.peft import AdapterRecord, load_adapter, load_base, record_of
from meshwright.run.mesh import ProcessMesh
from meshwright.run.resume import moves_on, wanted_of
from meshwright.run.trainer import Trainer
from meshwright.run.weights import load_weights


def begin(job: Job, trainer: Trainer) -> None:
    """Fill the trainer from a checkpoint to go on from, or from published weights; else it stays as it is."""
    place, resumed = trainer.mesh, job.resume and bool(checkpoints(job.out))
    about = begin_base(job, trainer)
    if resumed:
        same_adapters(about, job.out, place)
        wanted, anew = wanted_of(job.out, job.plan.text(), trainer)
        meta = load(job.out, wanted, place["world"], model_hash=identity(job.model), device=place.device)
        if meta.seed != job.settings.seed:
            raise MeshwrightError.one(
                "L005",
                f"the checkpoint was trained with seed {meta.seed}, and this run has {job.settings.seed}",
                place=f"--resume {job.out}",
                help=f"--seed {meta.seed}",
            )
        for one in anew:
            one.values.copy_(torch.stack(one.parts).sum(0) * one.share)
        trainer.set_step(meta.step)
        if trainer.adversary is not None:
            trainer.adversary.ready = moves_on(meta, job.plan.text(), job.train)
        trainer.sequences = meta.extra.get("sequences", meta.step * job.train.global_batch)
        if job.train.grow and meta.extra.get("batch", 0) > trainer.train.global_batch:
            trainer.take(meta.extra["batch"])
        if trainer.spread is not None and meta.extra.get("spread"):
            trainer.spread.smoothed = list(meta.extra["spread"])
        before = meta.extra.get("workload", job.train.text())
        if place.first and before != job.train.text():
            print(f"the checkpoint was trained on {before}: the data goes on at step {meta.step}", file=sys.stderr)
        return
    if job.resume and place.first:
        print(f"no checkpoint in {job.out}: begins anew", file=sys.stderr)
    if about is not None and job.adapter:
        held = trainer.pieces(shared=True)
        load_adapter(job.adapter, held, job.model, place["world"], about.digest, device=place.device)
        trainer.set_step(0)
    elif about is None and job.weights:
        frozen = [] if trainer.encoder is None else trainer.encoder.pieces()
        held = published([*trainer.pieces(shared=True), *frozen])
        load_weights(job.weights, held, job.model, place["world"], device=place.device)
        trainer.set_step(0)


def checkpoints(out: str) -> list[Path]:
    """The checkpoints in a run's folder."""
    return sorted(f for f in Path(out).glob("step-*") if f.is_dir()) if out else []


def about_adapters(job: Job, trainer: Trainer) -> AdapterRecord | None:
    """Return the record of a job's adapters, None where all is trained.

    Raises:
        MeshwrightError: H006 for weights that are not there.
    """
    if trainer.base is None:
        return None
    return AdapterRecord.of(job.model, job.train.lora, trainer.plan.precision.params, job.weights)


def begin_base(job: Job, trainer: Trainer) -> AdapterRecord | None:
    """Fill the base that adapters are trained over from the job's weights, if it has some, and return their record;
    collective. Raises as :func:`meshwright.run.lora.peft.load_base`."""
    place, wrong, about = trainer.mesh, (), None
    try:
        about = about_adapters(job, trainer)
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(place["world"], wrong, place.device)
    if about is not None and job.weights:
        load_base(job.weights, trainer.base, job.model, place["world"], device=place.device)
        trainer.settle()
    return about


def same_adapters(about: AdapterRecord | None, out: str, place: ProcessMesh) -> None:
    """Refuse to go on from a run's checkpoint of other adapters than these, or of none; collective.

    Raises:
        MeshwrightError: H009, on every rank alike.
    """
    wrong = ()
    try:
        before = record_of(CheckpointReader(find(out)))
        why = ""
        if (before is None) != (about is None):
            why = "it holds adapters, and this run trains all weights" if before else "it holds a whole model"
        elif before is not None and before.digest != about.digest:
            why = "its adapters were trained over other weights"
        elif before is not None and _function(before) != _function(about):
            why = f"its adapters are {before.lora.text()}, and this run's {about.lora.text()}"
        elif before is not None and before.stored != about.stored:
            why = f"its base was stored as {before.stored or 'it is'}, and this run's is as {about.stored or 'it is'}"
        if why:
            help = "say the workload and the --weights that it was begun with, or begin in another --out"
            raise MeshwrightError.one("H009", f"cannot go on: {why}", place=f"--resume {out}", help=help)
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(place["world"], wrong, place.device)


def _function(record: AdapterRecord) -> tuple[int, float, set[str]]:
    """Return the words of adapters that say what they compute."""
    return record.lora.rank, record.lora.scale, set(record.lora.targets)
