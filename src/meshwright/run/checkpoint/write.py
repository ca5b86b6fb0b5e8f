"""One process's part of a checkpoint: a file of values, and the index of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from meshwright.run import safetensors_file
from meshwright.run.blocks import windows
from meshwright.run.checkpoint.format import File, PartRecord, RankIndex, StateEntry, TensorLayout
from meshwright.run.pieces import Parameter, TensorPiece


def write_rank(
    folder: Path, rank: int, copies: Sequence[tuple[TensorPiece, torch.Tensor]], tensors: dict[str, tuple[int, ...]]
) -> None:
    """Write a process's file and its part of the index into a folder, both on the disk when this returns.

    `copies`: each piece that it owns with the values to write; `tensors`: :func:`shapes` of all it holds.

    Raises:
        OSError: the disk is full, and whatever else the operating system says.
    """
    folder.mkdir(exist_ok=True)
    layouts: dict[TensorLayout, int] = {}
    # the widest types first keep every tensor of the file aligned
    copies = sorted(copies, key=lambda c: -c[1].dtype.itemsize)
    heads = [
        safetensors_file.TensorHeader(f"{p.key}/{p.parameter.name}[{p.start}:{p.stop}]", v.dtype, (p.stop - p.start,))
        for p, v in copies
    ]
    file = written = None
    if copies:
        path = folder / f"rank-{rank:05d}.safetensors"
        written = safetensors_file.write(path, heads, (v for _, v in copies))
        file = File(name=path.name, size_bytes=written.size_bytes, header_crc32=written.header_crc32)
    entries = [
        StateEntry(
            state=piece.key,
            layout=layouts.setdefault(layout(piece.parameter), len(layouts)),
            start=piece.start,
            stop=piece.stop,
            dtype=safetensors_file.name_of(head.dtype),
            crc32=crc32,
            file=0,
            key=head.name,
        )
        for (piece, _), head, crc32 in zip(copies, heads, written.crc32 if written else ())
    ]
    index = RankIndex(tensors=tensors, file=file, layouts=tuple(layouts), entries=tuple(entries))
    safetensors_file.write_file(folder / f"rank-{rank:05d}.json", msgspec.json.encode(index))


def shapes(pieces: Sequence[TensorPiece]) -> dict[str, tuple[int, ...]]:
    """The published tensors that pieces are parts of, with their shapes."""
    return {part.name: tuple(part.shape) for piece in pieces for part in piece.parameter.parts}


def layout(parameter: Parameter) -> TensorLayout:
    """A parameter as the index says it."""
    return TensorLayout(
        tuple(parameter.shape),
        tuple(
            PartRecord(
                part.name,
                tuple(part.offset),
                tuple(first if single else (first, last) for first, last, single in windows(part, parameter.shape)),
                part.transposed,
            )
            for part in parameter.parts
        ),
    )
