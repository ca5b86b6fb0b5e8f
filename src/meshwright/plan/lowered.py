"""Operators in fewer bits than the rest: the matrix products of some layers, on some kinds of devices.

``lowered=none,fp16:qkv@0-11+down@3`` leaves the first kind of data-parallel slices as it is, and multiplies in fp16 on
the second the joint projection of queries, keys and values of twelve layers and what leads out of one MLP. Operands
are rounded for the product and its result goes back to the type of the others; weights and gradients stay as they are.
A precision alone (``fp16``) is all of them, and a file (``fp16:variances.json``) leaves the choice to a prediction: as
few as the step needs, those whose gradients vary most first to stay (QSync, Zhao et al., 2024, arXiv 2407.02327).
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from meshwright.spec.model import Model

#: Matrix products of a layer by their words, with the names of their pieces.
OPERATORS = {"qkv": "qkv", "out": "attention out", "up": "mlp up", "down": "mlp down"}
#: Types that products may be lowered to, and the word of a kind whose products stay.
TYPES, NONE = ("fp16", "bf16"), "none"
_SOME = re.compile(r"(\w+)@(\d{1,6})(?:-(\d{1,6}))?")


class FewerBits(NamedTuple):
    """The products that a kind has in ``dtype``: the operators ``some`` as (word, first layer, last layer), None for
    all; or what a prediction chooses by the ``file``."""

    dtype: str
    some: tuple[tuple[str, int, int], ...] | None = None
    file: str = ""

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """The words of the operators of a layer that are lowered."""
        if self.some is None:
            return tuple(OPERATORS)
        mine = {word for word, first, last in self.some if first <= layer <= last}
        return tuple(word for word in OPERATORS if word in mine)


@lru_cache(maxsize=256)
def read(text: str) -> FewerBits | None:
    """Return what a text says of a kind; None for :data:`NONE`.

    Raises:
        ValueError: the text says nothing of the sort; with what it says wrong.
    """
    if text == NONE:
        return None
    dtype, colon, rest = text.partition(":")
    if dtype not in TYPES:
        raise ValueError(f"{dtype!r} is none of {', '.join((NONE, *TYPES))}")
    if not colon:
        return FewerBits(dtype)
    if rest.endswith(".json"):
        return FewerBits(dtype, (), rest)
    some = []
    for one in rest.split("+"):
        match = _SOME.fullmatch(one)
        if match is None or match[1] not in OPERATORS:
            raise ValueError(f"{one!r} names no operators: say such as up@0-11, of {', '.join(OPERATORS)}")
        first, last = int(match[2]), int(match[3] or match[2])
        if first > last:
            raise ValueError(f"{one!r} ends before it begins")
        some.append((match[1], first, last))
    return FewerBits(dtype, tuple(some))


def written(dtype: str, chosen: set[tuple[str, int]]) -> str:
    """The text of some operators (word, layer) in a type."""
    if not chosen:
        return NONE
    parts = []
    for word in OPERATORS:
        layers = sorted(layer for one, layer in chosen if one == word)
        for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
            some = [layer for _, layer in run]
            parts.append(f"{word}@{some[0]}" + (f"-{some[-1]}" if len(some) > 1 else ""))
    return f"{dtype}:{'+'.join(parts)}"


def operators(model: Model) -> tuple[tuple[str, int], ...]:
    """All operators of a model that can be lowered, as (word, layer)."""
    return tuple((word, layer) for layer in range(model.num_layers) for word in OPERATORS)


def has_operators(model: Model) -> bool:
    """Whether every layer is one of attention by queries, keys and values, and of a dense MLP."""
    return not model.mixtures and all(
        block.mixer is None and block.mlp is not None and len(block.attentions) == 1 and not a.kv_lora_rank
        for block in model.blocks
        for a in block.attentions or (None,)
        if a is not None
    )
