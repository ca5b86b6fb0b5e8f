"""Adapters of experts as PEFT keeps them: those of all experts of a layer in two tensors, beside the one parameter that
`transformers` has of their matrices (PEFT's ``target_parameters``).

A factor A [rank, in] of each of n experts is a run of rows of one [n * rank, in]; of a factor B [out, rank] column j of
expert e is column j * n + e of one [out, rank * n]. Where both matrices of an expert are adapted, what belongs to gate
and up is named ``base_layer``, as PEFT wraps that first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from meshwright.run.blocks import whole
from meshwright.run.checkpoint.loading import Source

#: Names of what the matrices of experts are published as, by the part of the adapted one that each is.
SIDES = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1, "down_proj": None, "w2": None}
UP, DOWN = "gate_up_proj", "down_proj"
_FACTOR = re.compile(rf"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.({UP}|{DOWN})\.lora_([AB])\.weight")
_MATRIX = re.compile(rf"(.+\.experts\.\d+\.)({'|'.join(SIDES)})")


class FusedFactor(NamedTuple):
    """A factor of a layer's experts: its ``name`` in PEFT's file, which of both it is, and the ``parts`` by expert."""

    name: str
    side: str
    parts: tuple[str, ...]

    def shape(self, part: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape that it has where each part has one of [rank, in] or [out, rank]."""
        return (part[0] * len(self.parts), part[1]) if self.side == "A" else (part[0], part[1] * len(self.parts))

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the factor of all experts."""
        return torch.cat(parts) if self.side == "A" else torch.stack(parts, -1).flatten(1)

    def part(self, values: torch.Tensor, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the part of one expert, of this shape."""
        if self.side == "A":
            return values[number * shape[0] : (number + 1) * shape[0]]
        return values.view(shape[0], shape[1], len(self.parts))[..., number]


def fused(names: Iterable[str]) -> list[FusedFactor]:
    """Return the factors that those of experts among some names of a checkpoint are in."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if read := _FACTOR.fullmatch(name):
            found.setdefault((read[1], read[3], read[4]), {})[int(read[2])] = name
    out = []
    for (layer, word, side), parts in sorted(found.items()):
        inner = "base_layer." if word == UP and (layer, DOWN, side) in found else ""
        every = tuple(parts[number] for number in sorted(parts))
        out.append(FusedFactor(f"{layer}.mlp.experts.{inner}lora_{side}.weight", side, every))
    return out


def apart(there: Mapping[str, Source], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Source]:
    """Return the sources of a file of PEFT's, those of experts by expert where they have the shapes that are wanted."""
    found = dict(there)
    for one in fused(wanted):
        shapes = [wanted[name] for name in one.parts]
        if one.name not in found or found[one.name].block.shape != one.shape(shapes[0]):
            continue
        source = found.pop(one.name)
        for number, (name, shape) in enumerate(zip(one.parts, shapes, strict=True)):
            found[name] = Source(whole(name, shape), partial(_values, one, source, number, shape))
    return found


def _values(one: FusedFactor, source: Source, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    values = source.values().view(one.shape(shape))
    return one.part(values, number, shape).reshape(-1)


def added_to(name: str, factor: Callable[[str], torch.Tensor | None]) -> torch.Tensor | None:
    """Return what an expert's adapter adds to the published matrix of a name (without ``.weight``), before its scale;
    None where it has none. `factor` gives those of a checkpoint by name, None for what is not there."""
    read = _MATRIX.fullmatch(name)
    if read is None:
        return None
    side = SIDES[read[2]]
    word = DOWN if side is None else UP
    a, b = (factor(f"{read[1]}{word}.lora_{which}.weight") for which in "AB")
    if a is None:
        return None
    return (b if side is None else b.chunk(2)[side]) @ a
