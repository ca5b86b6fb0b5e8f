"""Formations: the ranks that train together from one membership to the next, and what their processes tell each other.

A *host* process keeps the memory of a rank and starts a *worker* process that trains; a host is what a node is in a
cluster. The launcher forms hosts into ranks, anew whenever one is lost or joins.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.run.world import Report


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a host: start a worker as ``rank`` of the ``epoch``-th formation, of ``size`` ranks under the words ``plan``,
    that meet over the file ``store``. ``counts``: microbatches of each data-parallel rank where they are not as many on
    all; ``params`` are those of the plan's schedule."""

    epoch: int
    rank: int
    size: int
    plan: str
    store: str
    counts: tuple[int, ...] = ()
    params: dict[str, Any] = {}


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To a host: end your worker, if there is one, and yourself."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a host: ask your worker to end in order."""


class Born(msgspec.Struct, frozen=True, tag=True):
    """From a host: its worker's process."""

    epoch: int
    pid: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it holds the state after ``step`` steps and so does its memory, twice; ``newest`` steps had been
    done by some rank that is still there. ``source``: where the state comes from: memory, disk, or nowhere."""

    epoch: int
    step: int
    newest: int
    source: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """From a worker of ``rank``: a step is done."""

    epoch: int
    rank: int
    step: int
    loss: float
    grad_norm: float
    seconds: float


class Over(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it has done all its steps, or was asked to end, or why it could not; from a host: its worker has
    ended with ``code`` without a word."""

    epoch: int
    report: Report | None = None
    code: int = 0


Order = Begin | Leave | Stop
Word = Born | Settled | Over
