"""Labelled samples in batches: the images or features of a step with their labels.

What a step trains on is a pure function of (seed, step), as of text (:mod:`.corpus`): every epoch visits each sample
once, in an order that a keyed permutation gives, and a data-parallel rank takes its share of the rows. So is how an
image is changed, by (seed, place in that order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.data.augment import AS_THEY_ARE, Augment
from meshwright.run.data.corpus import Batch, permute, sequences
from meshwright.run.data.labelled import CLIENTS, HELD, INPUTS, LABELS, USUAL, LabelledMeta, read_meta
from meshwright.spec.convolution import SQUARE
from meshwright.spec.diffusion import Denoised, Latents, NoisyClasses
from meshwright.spec.encoded import denoiser_of, image_channels, is_encoded
from meshwright.spec.model import Model
from meshwright.spec.vectors import FeatureVectors
from meshwright.spec.workload import Train

#: The key of the permutation whose end is held out: one that no epoch has.
HELD_KEY = (0, 2**32)
#: The class of rows that fill up a batch of samples to judge by: cross-entropy leaves them out.
PADDING = -100


class SampleLayout(NamedTuple):
    """Where an array has an image's channels: ``first``, ``last`` or, of one channel, in no dimension (``none``); "" of
    features, which are no images, and ``flat`` of images whose pixels, row by row, are features."""

    channels: str

    def images(self, some: NDArray[Any]) -> NDArray[Any]:
        """Images [n, channels, height, width], or videos [n, frames, ...]; features [n, width]."""
        if self.channels == "flat":
            return some.reshape(len(some), -1)
        if self.channels == "none":
            return np.expand_dims(some, -3)
        return np.moveaxis(some, -1, -3) if self.channels == "last" else some


class LabelledSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples as one corpus to what trains on it: those ``chosen`` [n] of ``inputs`` and ``labels`` [N] on disk;
    ``clients`` [N] says whose each is, ``held`` [h] are those that their file holds out. Steps take turns on
    ``clusters``, equal runs of them; 0 for none. The last ``padding`` of those chosen fill up a batch to judge by."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    chosen: NDArray[np.int64]
    layout: SampleLayout
    mean: tuple[float, ...]
    std: tuple[float, ...]
    global_batch: int
    seed: int = 0
    augment: Augment = AS_THEY_ARE
    clients: NDArray[np.int64] | None = None
    held: NDArray[np.int64] | None = None
    clusters: int = 0
    padding: int = 0

    #: That of text in rows, of which there are none here.
    rows: None = None
    seq_len: int = 1

    @property
    def num_sequences(self) -> int:
        """The samples."""
        return len(self.chosen)

    @property
    def own_held_out(self) -> bool:
        """Whether their file says which are held out."""
        return self.held is not None

    def lengths(self) -> None:
        """Nothing: samples are no documents."""

    def batch(self, step: int, dp_index: int = 0, dp_size: int = 1) -> Batch:
        """The share of data-parallel rank `dp_index` of step `step`, counted from 0: rows [dp_index, dp_index + 1) *
        global_batch / dp_size of the global batch.

        Raises:
            ValueError: `dp_size` does not divide the global batch.
        """
        if self.clusters:
            turn, part = divmod(step, self.clusters)
            mine = np.array_split(self.chosen, self.clusters)[part]
            return self._share(mine, turn * self.global_batch, self.global_batch, dp_index, dp_size)
        return self.share(step * self.global_batch, self.global_batch, dp_index, dp_size)

    def share(self, first: int, count: int, dp_index: int = 0, dp_size: int = 1) -> Batch:
        """The share of a data-parallel rank of `count` samples of the endless order, from the one at `first` on.

        Raises:
            ValueError: `dp_size` does not divide the count.
        """
        return self._share(self.chosen, first, count, dp_index, dp_size)

    def own(self, step: int, part: int, parts: int, among: int = 0, of: int = 1, rows: int = 1) -> Batch:
        """The `rows` of one of `of` ranks, that at `among`, in step `step` of a replica that has the samples of `part`
        alone, one of `parts`."""
        return self._share(self.members(part, parts), step * of * rows, of * rows, among, of)

    def members(self, part: int, parts: int) -> NDArray[np.int64]:
        """The samples of one of `parts` who have their own: those of its clients, dealt in equal runs, where samples
        say whose they are; else an equal run of them.

        Raises:
            MeshwrightError: D013 where it has none.
        """
        found = np.array_split(self.chosen, parts)[part]
        if self.clients is not None:
            owners = self.clients[self.chosen]
            found = self.chosen[owners * parts // (int(self.clients.max()) + 1) == part]
        if not len(found):
            message = f"part {part + 1} of {parts} has no samples of its own"
            raise MeshwrightError.one("D013", message, place="--data", help="more samples, or fewer replicas")
        return found

    def sequences_at(self, numbers: NDArray[np.int64], places: NDArray[np.int64] | None = None) -> Batch:
        """Samples by their `numbers` [n] among these, as they are, or changed as those at `places` of an order are."""
        if places is not None:
            return self._made(self.chosen[numbers], places)
        return msgspec.structs.replace(self, augment=AS_THEY_ARE)._made(self.chosen[numbers], numbers)

    def groups(self, parts: int) -> list[NDArray[np.int64]]:
        """The samples of each class, or, of values, those of equal `parts` in the order of these."""
        labels = self.labels[self.chosen]
        if labels.dtype.kind == "f":
            order = np.argsort(labels.reshape(len(labels), -1)[:, 0], kind="stable")
            return [self.chosen[some] for some in np.array_split(order, parts)]
        return [self.chosen[labels == one] for one in np.unique(labels)]

    def drawn(
        self, rng: np.random.Generator, groups: Sequence[NDArray[np.int64]], shares: NDArray[np.float64], rows: int
    ) -> Batch:
        """So many samples drawn with replacement: each from one of the `groups`, which have these `shares`."""
        found = [rng.choice(groups[group]) for group in rng.choice(len(groups), rows, p=shares)]
        return self._made(np.array(found, np.int64), rng.integers(1 << 62, size=rows))

    def _share(self, some: NDArray[np.int64], first: int, count: int, dp_index: int, dp_size: int) -> Batch:
        if count % dp_size:
            raise ValueError(f"a global batch of {count} does not divide by {dp_size}")
        rows = count // dp_size
        places = np.arange(first + dp_index * rows, first + (dp_index + 1) * rows)
        drawn = sequences(places, len(some), self.seed)
        found = self._made(some[drawn], places)
        if self.padding:
            found.targets[torch.from_numpy(drawn >= len(some) - self.padding)] = PADDING
        return found

    def _made(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> Batch:
        """The batch of some rows, which stand at these places of the order that they are drawn in."""
        found = self.layout.images(np.asarray(self.inputs[rows]))
        if found.dtype == np.uint8:
            mean, std = (np.float32(one).reshape(-1, *(1,) * min(2, found.ndim - 2)) for one in (self.mean, self.std))
            found = (found.astype(np.float32) / np.float32(255) - mean) / std
        if self.layout.channels not in ("", "flat"):
            found = self.augment.changed(found, self.seed, places)
        inputs = torch.from_numpy(np.ascontiguousarray(found))
        return Batch(inputs, None, torch.from_numpy(np.asarray(self.labels[rows])))

    def held_out(self, share: float) -> tuple[LabelledSamples, LabelledSamples]:
        """Divide samples in two: what there is to train on, and a `share` to judge by, drawn alike whatever the seed,
        and never changed; those that their file holds out, where it says which.

        Raises:
            ValueError: there are fewer to train on than a step's batch, or none to judge by.
        """
        if self.held is not None:
            return self, self.judged()
        mixed = permute(np.arange(len(self.chosen)), len(self.chosen), HELD_KEY)
        cut = len(mixed) - int(len(mixed) * share)
        train, judged = (np.sort(self.chosen[some]) for some in (mixed[:cut], mixed[cut:]))
        if len(train) < self.global_batch or not len(judged):
            raise ValueError(f"{len(mixed):,} samples, of which {share:.2%} are held out")
        return msgspec.structs.replace(self, chosen=train), self.judged(judged)

    def judged(self, chosen: NDArray[np.int64] | None = None) -> LabelledSamples:
        """These samples, or those held out, or all, to judge by. Of classes the last batch is filled up; of values,
        which have no label that counts for nothing, what does not fill one is left out.

        Raises:
            MeshwrightError: D005 for fewer values than a step's batch.
        """
        if chosen is None:
            chosen = self.chosen if self.held is None else self.held
        padding = -len(chosen) % self.global_batch if self.labels.dtype.kind != "f" else 0
        if len(chosen) + padding < self.global_batch:
            message = f"there are {len(chosen):,} values to judge by, and a batch is of {self.global_batch:,}"
            raise MeshwrightError.one("D005", message, place="--data", help="more of them, or a smaller batch")
        said = {"padding": padding, "seed": 0, "augment": AS_THEY_ARE, "clusters": 0, "clients": None, "held": None}
        return msgspec.structs.replace(self, chosen=np.append(chosen, chosen[:1].repeat(padding)), **said)


def load(
    folder: Path,
    train: Train,
    model: Model,
    *,
    seed: int,
    augment: Augment = AS_THEY_ARE,
    labels: NDArray[np.int64] | None = None,
    place: str,
) -> LabelledSamples:
    """The labelled samples in a folder, for a model that classifies them or finds the noise in them; `labels` [N] stand
    in for theirs, and those of -1 are left out.

    Raises:
        MeshwrightError: D005 for fewer samples than a step's batch; D013 with all in which they do not fit the model.
    """
    meta = read_meta(folder)
    layout, wrong = _fitting(meta, train, model, place)
    wrong += _normalised(meta, model, place)
    held = np.fromfile(folder / HELD, np.uint8).astype(bool) if meta.held else np.zeros(meta.shape[0], bool)
    known = np.ones(meta.shape[0], bool)
    if labels is None:
        labels = np.fromfile(folder / LABELS, meta.label_kind).reshape(meta.label_shape)
    elif len(labels) != meta.shape[0]:
        message = f"there are {meta.shape[0]:,} samples, and --clusters has {len(labels):,}"
        wrong.append(Diagnostic(code="D013", message=message, place=place, help="name the file of these samples"))
        raise MeshwrightError(wrong)
    else:
        known, labels = labels >= 0, np.maximum(labels, 0)
    count = int((known & ~held).sum())
    if count < train.global_batch:
        message = f"there are {count:,} samples, and a step trains {train.global_batch:,}"
        wrong.append(Diagnostic(code="D005", message=message, place=place, help="more samples, or a smaller batch"))
    wrong += _labels(labels, model, place)
    if wrong:
        raise MeshwrightError(wrong)
    clients = np.fromfile(folder / CLIENTS, "<i8").astype(np.int64) if meta.clients else None
    return LabelledSamples(
        inputs=np.memmap(folder / INPUTS, meta.kind, "r", shape=meta.shape),
        labels=labels,
        chosen=np.flatnonzero(known & ~held),
        held=np.flatnonzero(known & held) if (known & held).any() else None,
        layout=layout,
        mean=meta.mean or (USUAL,),
        std=meta.std or (USUAL,),
        global_batch=train.global_batch,
        seed=seed,
        augment=augment,
        clients=clients,
        clusters=train.clusters,
    )


def _fitting(meta: LabelledMeta, train: Train, model: Model, place: str) -> tuple[SampleLayout, list[Diagnostic]]:
    """How samples are laid out, and D013 where that is not what a model reads."""
    own, side, film = model.embedding, train.image, []
    channels = _channels(model)
    if isinstance(own, Latents):
        side = model.embedding.patch * isqrt(train.seq_len // max(1, train.frames))
        film = [train.frames] if train.frames else []
    if isinstance(model.embedding, FeatureVectors):
        if math.prod(meta.shape[1:]) == channels:  # the pixels of an image are features
            return SampleLayout("" if meta.shape[1:] == (channels,) else "flat"), []
        message = f"the samples are of the shape {list(meta.shape[1:])}, and {model.name} reads {channels} features"
        help = f"say num_features={math.prod(meta.shape[1:])} in the model, as the samples have them"
        return SampleLayout(""), [Diagnostic(code="D013", message=message, place=place, help=help)]
    wanted = f"{channels} channels of {side} x {side} pixels"
    _, *sizes = meta.shape
    for name, shape in (("last", [side, side, channels]), ("first", [channels, side, side]), ("none", [side, side])):
        if sizes == film + shape and (name != "none" or channels == 1):
            return SampleLayout(name), []
    said, key = f"image={side}", "in_channels of its vae" if is_encoded(model) else "num_channels"
    if isinstance(model.embedding, Latents):
        said, key = f"seq={train.seq_len} of patches of {model.embedding.patch}", "in_channels"
        wanted = f"{train.frames} frames of {wanted}" if film else wanted
    message = f"the samples are of the shape {sizes}, and {model.name} reads {wanted} ({said})"
    word = said.partition("=")[0]
    help = f"say {word}= as the samples have it, or a model of their channels ({key}), or give it {wanted}"
    return SampleLayout(""), [Diagnostic(code="D013", message=message, place=place, help=help)]


def _channels(model: Model) -> int:
    """Channels of the samples that a model reads, by its frozen encoder where it has one."""
    return image_channels(model) if is_encoded(model) else model.embedding.channels


def _normalised(meta: LabelledMeta, model: Model, place: str) -> list[Diagnostic]:
    """D013 for means and deviations of another number of channels than a model reads."""
    channels, found = _channels(model), []
    for key, values in (("mean", meta.mean), ("std", meta.std)):
        if len(values) not in (0, 1, channels):
            message = f"{key} is said of {len(values)} channels, and {model.name} reads {channels}"
            help = f"give {key} {channels} values, or one for all channels"
            found.append(Diagnostic(code="D013", message=message, place=place, help=help))
    return found


def _labels(labels: NDArray[Any], model: Model, place: str) -> list[Diagnostic]:
    """D013 for labels that are no classes of a model, or no values."""
    latents, why = isinstance(model.head, Denoised), ""
    rows = max(1, denoiser_of(model).embedding.classes) - 1 if latents else model.head.rows
    if latents and not rows:
        return []
    tells = "knows" if latents else "tells"
    if not latents and not isinstance(model.head, NoisyClasses) and model.head.loss == SQUARE:
        if labels.shape[1:] != (rows,) and (rows, labels.ndim) != (1, 1):
            why = f"labels are of the shape {list(labels.shape)}, and {model.name} tells {rows} values of a sample"
    elif labels.dtype.kind == "f" or labels.ndim != 1:
        why = f"labels are {labels.dtype} of the shape {list(labels.shape)}, and classes are whole numbers [N]"
    elif int(labels.min()) < 0 or int(labels.max()) >= rows:
        worst = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        why = f"there is a label {worst}, and {model.name} {tells} {rows:,} classes, 0 to {rows - 1}"
    help = "number classes from 0, say num_labels in the model, or loss square of values"
    help = "number classes from 0, or say num_embeds_ada_norm in the model" if latents else help
    if isinstance(model.head, NoisyClasses):
        help = "name the clusters.npz that experts left (--clusters), or say num_labels as the data have classes"
    return [Diagnostic(code="D013", message=why, place=place, help=help)] if why else []
