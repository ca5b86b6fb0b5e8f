"""The data of a run: documents on disk as tokens (:mod:`.store`), in batches (:mod:`.corpus`), of one text or of
several with weights (:mod:`.mixture`); or labelled samples (:mod:`.labelled`), in batches (:mod:`.samples`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.packing import shape
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.data import documents, indexed, labelled, samples
from meshwright.run.data.augment import AS_THEY_ARE, Augment
from meshwright.run.data.corpus import Batch, Corpus, halves, permute, sequences, write_lengths
from meshwright.run.data.mixture import MixedText
from meshwright.run.data.rows import packed
from meshwright.run.data.samples import LabelledSamples
from meshwright.run.data.store import (
    LEARNT,
    META,
    MIXTURE,
    STARTS,
    TOKENS,
    CorpusMeta,
    MixtureMeta,
    build,
    digest,
    look,
    whole,
)
from meshwright.spec import naming
from meshwright.spec.architecture import Model
from meshwright.spec.diffusion import Denoised
from meshwright.spec.workload import OVER_BATCHES, Train

__all__ = [
    "TOKENS",
    "Augment",
    "Batch",
    "Corpus",
    "LabelledSamples",
    "MixedText",
    "build",
    "cache_folder",
    "digest",
    "documents",
    "held_out",
    "indexed",
    "load",
    "look",
    "permute",
    "sequences",
    "whole",
    "write_lengths",
]


def load(
    folder: Path,
    train: Train,
    *,
    vocab: int,
    model: Model | None = None,
    seed: int = 0,
    boundaries: bool = True,
    microbatch: int = 1,
    augment: Augment = AS_THEY_ARE,
    labels: NDArray[np.int64] | None = None,
    place: str = "--data",
) -> Corpus | MixedText | LabelledSamples:
    """The corpus in a folder that :func:`build` made, for the sequences of `train` in microbatches of so many, and a
    model of `vocab` tokens; labelled samples, changed as `augment` says and with other `labels` where these are given,
    for a `model` that classifies them, or finds the noise in them.

    Raises:
        MeshwrightError: D005 when it does not fill one step's batch; D006 for ids that the model does not have; D009
            for a mixture of texts in rows that are laid over a whole batch; D013 for samples that are not what the
            model reads.
    """
    if (folder / labelled.META).is_file() != (model is not None and naming.labelled(model)):
        raise _another(folder, model, place)
    if (folder / labelled.META).is_file():
        return samples.load(folder, train, model, seed=seed, augment=augment, labels=labels, place=place)
    how = {"vocab": vocab, "boundaries": boundaries, "microbatch": microbatch}
    if (folder / MIXTURE).is_file():
        return _mixed(folder, train, seed=seed, place=place, **how)
    return _alone(folder, train, seed=seed, place=place, **how)


def _another(folder: Path, model: Model | None, place: str) -> MeshwrightError:
    """The error of text for a model of labelled samples, or of these for a model of text."""
    name = "the model" if model is None else model.name
    if (folder / labelled.META).is_file():
        message, help = f"the data are labelled samples, and {name} reads text", "name a text, or a model of images"
    else:
        does = "finds the noise in" if isinstance(model.head, Denoised) else "classifies"
        message, help = f"{name} {does} labelled samples, and the data are text", "name a .npz file with labels"
    return MeshwrightError.one("D013", message, place=place, help=help)


def _mixed(folder: Path, train: Train, *, seed: int, place: str, **how: Any) -> MixedText:
    meta, found, wrong = msgspec.json.decode((folder / MIXTURE).read_bytes(), type=MixtureMeta), [], []
    if train.packing in OVER_BATCHES or train.clusters:
        word = f"pack={train.packing}" if train.packing in OVER_BATCHES else f"clusters={train.clusters}"
        message = f"{word} lays out one text, and the mixture has {len(meta.sources)}"
        help = "take pack=packed, or name one text"
        raise MeshwrightError.one("D009", message, place=place, help=help)
    for number, source in enumerate(meta.sources):
        try:
            own = {"seed": seed + (number << 32), "place": f"--data {source.name}", "fills": False}
            found.append(_alone(folder.parent / source.folder, train, **own, **how))
        except MeshwrightError as error:
            wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    return MixedText(sources=tuple(found), weights=tuple(source.share for source in meta.sources))


def _alone(
    folder: Path,
    train: Train,
    *,
    vocab: int,
    seed: int,
    boundaries: bool,
    microbatch: int,
    place: str,
    fills: bool = True,
) -> Corpus:
    """One text; `fills`: it has to fill a step's batch by itself, else a sequence."""
    meta = msgspec.json.decode((folder / META).read_bytes(), type=CorpusMeta)
    wrong = []
    starts = np.fromfile(folder / STARTS, "<i8").astype(np.int64)
    learnt = np.memmap(folder / LEARNT, np.uint8, "r") if meta.chats and meta.num_tokens else None
    rows = packed(starts, meta.num_tokens, train, microbatch, learnt)
    row_tokens, batch = train.seq_len, train.global_batch
    least = f": {(train.tokens_per_step + 1):,} tokens are the least"
    if rows is None:
        held = max(0, meta.num_tokens - 1) // train.seq_len
    else:
        row_tokens, batch, _ = shape(train, microbatch)
        held, least = rows.num_groups * rows.together, ""
    least = least if fills else ""
    if held < (batch if fills else 1):
        wrong.append(
            Diagnostic(
                code="D005",
                message=f"the text is too short: its {meta.num_tokens:,} tokens fill {held:,} sequences of "
                f"{row_tokens:,}, and {f'a step trains {batch:,}' if fills else 'one is the least'}",
                place=place,
                help=f"more text, or a smaller batch or seq{least}",
            )
        )
    if meta.largest >= vocab:
        wrong.append(
            Diagnostic(
                code="D006",
                message=f"the text has token {meta.largest:,}, and the model's vocabulary ends at {vocab - 1:,}",
                place=place,
                help="use the model's own tokenizer: --tokenizer FOLDER/tokenizer.json"
                if meta.largest > 256
                else "text as bytes needs a vocabulary of 257 or more: --tokenizer names the model's own or its folder",
            )
        )
    if wrong:
        raise MeshwrightError(wrong)
    return Corpus(
        tokens=np.memmap(*meta.tokens(folder), "r"),
        starts=starts,
        largest=meta.largest,
        seq_len=train.seq_len,
        global_batch=batch,
        seed=seed,
        boundaries=boundaries,
        rows=rows,
        clusters=train.clusters,
        learnt=learnt,
    )


def held_out(text: Corpus | MixedText | LabelledSamples, share: float) -> tuple[Any, Any]:
    """Divide a text in two: what there is to train on, and the last `share` of its tokens to judge by, which is in the
    same order whatever the seed.

    Raises:
        ValueError: one of the parts is shorter than a step's batch.
    """
    return (
        text.held_out(share)
        if isinstance(text, MixedText | LabelledSamples)
        else halves(text, share, least=text.global_batch)
    )


def cache_folder() -> Path:
    """Where tokenised corpora are kept: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright" / "corpus"
