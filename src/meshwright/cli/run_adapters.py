"""Adapters in ``meshwright run``: the weights they are trained over, a folder to go on from, and what they are written
as; and what its steps are reported to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli.run_worlds import bad
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.cli.question import Question
    from meshwright.cli.run_options import RunOptions
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: What adapters are written as when a run is done, by the words of --export.
EXPORTS = ("adapter", "merged", "none")
#: Files that tell a folder of published weights.
PUBLISHED = ("model.safetensors", "model.safetensors.index.json")


def reported(given: RunOptions) -> list[Diagnostic]:
    """Return a diagnostic for each place that steps cannot be reported to."""
    from meshwright.run.reports import callback, missing

    wrong = missing(given.tensorboard, given.wandb)
    if given.tensorboard and Path(given.tensorboard).is_file():
        wrong.append(bad(f"--tensorboard {given.tensorboard}", "it is a file: name a folder"))
    if given.callback:
        try:
            callback(given.callback)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return wrong


def weights_of(given: RunOptions, question: Question, train: Train) -> str:
    """Return the folder of the weights that a run begins with: those beside the model's own configuration where
    adapters are trained and nobody says."""
    if given.weights or train.lora is None:
        return given.weights
    said = question.base / question.model
    folder = said if said.is_dir() else said.parent
    published = (said.is_dir() or said.is_file()) and any((folder / name).is_file() for name in PUBLISHED)
    return str(folder) if published else ""


def adapted(given: RunOptions, weights: str, model: Model, train: Train, wrong: list[Diagnostic]) -> Train:
    """Return the workload with the adapters of ``--adapter``; what is wrong with the options of adapters goes to
    `wrong`."""
    if train.lora is None:
        help = "adapters are trained with phase=lora in --train"
        wrong += [
            bad(f"--{word} {getattr(given, word)}", help) for word in ("adapter", "export") if getattr(given, word)
        ]
        if given.resume and given.weights:
            wrong.append(bad("--resume --weights", "a run begins with a checkpoint or with weights: keep one of them"))
        return train
    if given.export and given.export not in EXPORTS:
        wrong.append(bad(f"--export {given.export}", f"it is one of {', '.join(EXPORTS)}"))
    elif given.export in EXPORTS[:2] and not given.out:
        wrong.append(bad(f"--export {given.export}", "it needs a folder to write to: --out FOLDER"))
    elif given.export == "merged" and not weights:
        wrong.append(bad("--export merged", "adapters are added to published weights: --weights FOLDER"))
    if given.adapter and given.resume:
        wrong.append(bad("--resume --adapter", "a run begins with a checkpoint or with adapters: keep one of them"))
    if not given.adapter:
        return train
    from meshwright.run.lora.peft import read_config
    from meshwright.spec.workload import Lora

    try:
        found = read_config(given.adapter, model)
    except MeshwrightError as error:
        wrong += error.diagnostics
        return train
    if train.lora not in (Lora(), found):
        help = f"write --train ...,{found.text()}, or phase=lora alone"
        wrong.append(
            Diagnostic(
                code="H009",
                message=f"the adapters are {found.text()}, and the workload says {train.lora.text()}",
                place=f"--adapter {given.adapter}",
                help=help,
            )
        )
    return msgspec.structs.replace(train, lora=found)
