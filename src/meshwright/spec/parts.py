"""A part of a model: some layers that follow one another, which is a model too, with open ends where it was cut."""

from __future__ import annotations

import re

import msgspec

from meshwright.spec.architecture import Model, stack
from meshwright.spec.ends import Boundary

_RANGE = re.compile(r"(\d{1,6})?:(\d{1,6})?")


def part_of(model: Model, first: int, end: int) -> Model:
    """The layers `first` to `end` (without it, counted from 0) of a model, as a model. Where others come before or
    after them, hidden states come in or go out in place of the embedding or the head. Who cuts says what is frozen."""
    if (first, end) == (0, model.num_layers):
        return model
    blocks, pattern = stack(model.block(layer) for layer in range(first, end))
    before = model.embedding
    if first:
        own = model.block(first - 1).stream
        before = Boundary(stream=own, beside=tuple(s for s in model.carried(first) if s != own))
    after = Boundary(stream=model.block(end - 1).stream) if end < model.num_layers else model.head
    return msgspec.structs.replace(model, blocks=blocks, pattern=pattern, embedding=before, head=after, frozen=0)


def named_parts(model: Model) -> dict[str, tuple[int, int]]:
    """The parts that have a name: the layers of each stream of tokens, as (first, end), where they are neighbours."""
    found = {}
    for index, stream in enumerate(model.flows):
        layers = [i for i in range(model.num_layers) if model.block(i).stream == index]
        if layers and layers == list(range(layers[0], layers[-1] + 1)):
            found[stream.name] = (layers[0], layers[-1] + 1)
    return found


def read_part(text: str, model: Model) -> tuple[int, int] | None:
    """The layers (first, end) that a text means: ``0:8``, ``:8``, ``8:`` or the name of a part; None for none."""
    if match := _RANGE.fullmatch(text):
        first, end = int(match[1] or 0), int(match[2]) if match[2] else model.num_layers
        return (first, end) if first < end <= model.num_layers else None
    return named_parts(model).get(text)


def is_range(text: str) -> bool:
    """Whether a text is a range of layers, whatever the model."""
    return text != ":" and _RANGE.fullmatch(text) is not None
