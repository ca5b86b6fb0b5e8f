"""Published weights of the parameters in a distributed checkpoint of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.errors import MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.checkpoint.dcp import DistributedReader
from meshwright.run.companions import NONE, Companions
from meshwright.run.new_folder import new_folder, refuse
from meshwright.run.weights import assembled, matched, write_config, write_tensors
from meshwright.spec.architecture import Model


def convert_distributed(
    checkpoint: str | Path,
    folder: str | Path,
    model: Model,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype | None = None,
    companions: Companions = NONE,
) -> Path:
    """Write the parameters of torch's distributed checkpoint as published weights, one tensor at a time. `wanted`: the
    shapes of the model's tensors by name; `dtype`: the type to convert to, None = as they are; `companions`: the
    model's configuration and tokenizer, which are written beside them.

    Returns:
        The folder, which is new and appears when it is complete.

    Raises:
        MeshwrightError: H007 when they are not the model's, H008 when they cannot be written, H010 when they are not
            read.
    """
    folder = Path(folder)
    refuse(folder)
    saved = DistributedReader(checkpoint, wanted)
    there = {name: saved.source(name) for name in saved.names()}
    sources, wrong = matched(there, wanted, model, str(checkpoint))
    if wrong:
        raise MeshwrightError(wrong)
    kinds = [saved.there[saved.key("param", name)].dtype for name in there]
    most = dtype or max(kinds, key=kinds.count)
    heads = [
        safetensors_file.TensorHeader(name, dtype or _type_of(saved, name, most), tuple(shape))
        for name, shape in sorted(wanted.items())
    ]
    with new_folder(folder) as temporary:
        write_tensors(temporary, heads, lambda head: assembled(sources[head.name], head.dtype))
        companions.copy(temporary)
        if companions.config is not None:
            write_config(temporary, companions.config, str(most).removeprefix("torch."))
    return folder


def _type_of(saved: DistributedReader, name: str, usual: torch.dtype) -> torch.dtype:
    """The type of a tensor in a distributed checkpoint; the usual one where it is there by another name."""
    stored = saved.there.get(saved.key("param", name))
    return usual if stored is None else stored.dtype
