"""Roles: what each task of a step is, before its sizes are known.

The structure of a step (:mod:`meshwright.lower.structure`) names its tasks by role alone, so plans that differ in
widths, batch or place share it. :mod:`meshwright.lower.bind` turns a role into a program for one plan. ``slice``
numbers a class of data-parallel slices and ``rank`` a pipeline rank; both are 0 where all ranks are alike.
"""

from __future__ import annotations

import msgspec

from meshwright.lower.units import Unit

#: What a pass has beside it that ends with the update of its layers.
UPDATED = "update"


class PassRole(msgspec.Struct, frozen=True, cache_hash=True):
    """A pass over some layers: ``F``, ``B``, ``W`` or ``BW``. ``beside`` are the exchanges ("gather", "reduce") of
    these layers that are overlapped with it, or "update" where they are updated at its end; ``share`` is its part of
    the stage's pass."""

    which: str
    units: tuple[Unit, ...]
    slice: int
    rank: int
    beside: tuple[str, ...] = ()
    share: float = 1.0


class MessageRole(msgspec.Struct, frozen=True, cache_hash=True):
    """Activations or their gradient, sent from one pipeline rank to another; `layer` is the first behind the border
    where what is sent depends on it (a model of several streams of tokens), else 0."""

    slice: int
    source: int
    target: int
    layer: int = 0


class LinkRole(msgspec.Struct, frozen=True, cache_hash=True):
    """Activations of some sequences, sent over a link from one pool to another, or their gradient ``back``; ``slice``
    is of the pool that sends."""

    link: int
    slice: int
    sequences: int
    back: bool


class ExchangeRole(msgspec.Struct, frozen=True, cache_hash=True):
    """Parameters gathered ("gather"), gradients reduced ("reduce"), or what replicas hold of their own averaged
    ("average"), of some layers, over data-parallel ranks; several one after the other
    are joined by "+"; ``part``: of the layers, those that are averaged together, or
    the turn in which replicas meet."""

    what: str
    units: tuple[Unit, ...]
    rank: int
    part: int = 0


class TwinRole(msgspec.Struct, frozen=True, cache_hash=True):
    """Gradients that two pipeline ranks hold of the same weights, added up: those of ``units``, or, without any, of a
    tied embedding."""

    units: tuple[Unit, ...]
    slice: int
    ranks: tuple[int, int]


class NormRole(msgspec.Struct, frozen=True):
    """The gradient norm, which joins every rank that takes the same step."""

    slice: int = 0


class MeasureRole(msgspec.Struct, frozen=True, cache_hash=True):
    """The norms of the matrices that one pipeline rank holds and of their updates; without ``units``, their sum over
    every rank that takes the same step."""

    units: tuple[Unit, ...]
    slice: int
    rank: int = 0


class SlopesRole(msgspec.Struct, frozen=True):
    """The slopes that replicas have measured by forward passes, which all get."""

    slice: int = 0


class PredictionsRole(msgspec.Struct, frozen=True):
    """The predictions that heads of every replica make of public text, which its neighbours of a ``turn`` get."""

    turn: int = 0


class UpdateRole(msgspec.Struct, frozen=True, cache_hash=True):
    """The optimizer's step over the layers that one pipeline rank holds."""

    units: tuple[Unit, ...]
    slice: int
    rank: int


class CodeRole(msgspec.Struct, frozen=True, cache_hash=True):
    """The encoding ("encode") or decoding ("decode") of what is exchanged of some layers, of a ``part`` of them; the
    change of a round and the outer step are a part of it."""

    what: str
    units: tuple[Unit, ...]
    slice: int
    rank: int
    part: int = 0


class TransferRole(msgspec.Struct, frozen=True, cache_hash=True):
    """State of some layers moved between tiers of memory: ``params``, ``weights`` (parameters after an update),
    ``grads``, ``optimizer`` or ``activations``, by one ``way`` (the queue it is on)."""

    what: str
    way: str
    units: tuple[Unit, ...]
    slice: int
    rank: int


class HostRole(msgspec.Struct, frozen=True, cache_hash=True):
    """Work of the host's processor on the state of some layers: their ``update``, or the ``sum`` of gradients of
    several microbatches."""

    what: str
    units: tuple[Unit, ...]
    slice: int
    rank: int


Role = (
    PassRole
    | MessageRole
    | LinkRole
    | ExchangeRole
    | TwinRole
    | NormRole
    | MeasureRole
    | SlopesRole
    | PredictionsRole
    | UpdateRole
    | CodeRole
    | TransferRole
    | HostRole
)


class Roles:
    """Distinct roles, numbered in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.number: dict[Role, int] = {}

    def __call__(self, role: Role) -> int:
        return self.number.setdefault(role, len(self.number))
