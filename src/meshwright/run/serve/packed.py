"""The packed tokens of an iteration: plain numbers, which travel to every rank of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class PackedRow(NamedTuple):
    """A sequence's part of an iteration: ``new`` tokens behind ``past`` others, whose block ``table`` holds all that is
    kept. The first ``prompt`` of its tokens were not generated."""

    new: int
    past: int
    table: Sequence[int]
    prompt: int = 0


class PackedTokens(msgspec.Struct, frozen=True):
    """The tokens of an iteration, those of one sequence behind those of another: their ids and ``positions``, each
    sequence's ``rows``, and which of the tokens want scores (``wanted``). ``adapters`` are the numbers of the rows'
    LoRA adapters (-1: none), nothing where there are none. ``whole``: this is one text, computed
    apart from all blocks."""

    tokens: list[int]
    positions: list[int]
    rows: list[PackedRow]
    wanted: list[int]
    adapters: list[int] = []
    whole: bool = False
