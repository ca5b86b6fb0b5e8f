"""Servers of clients: deciders of who trains next, for how long, and what of what arrives is merged with which weight.

Clients take steps of their own on the server's model, and send what changed. A decider is told what happened
(:class:`Answered`, :class:`Left`, :class:`Woken`) and answers with what to do (:class:`TrainOn`, :class:`Ask`,
:class:`Merge`, :class:`Keep`, :class:`Turn`, :class:`Wake`). It has no clock: events carry their time.
``simulate/clients.py`` drives one on a virtual clock with predicted times, ``run/clients.py`` with real processes.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The job starts; nobody has anything to do."""

    at_s: float = 0.0


class Answered(msgspec.Struct, frozen=True, tag=True):
    """A ``client``'s change in ``steps`` of its task arrived; it began with version ``version`` of the model, at
    ``began_s``. With it come affinities of merged tasks, row by row, where it has measured them."""

    client: int
    task: int
    version: int
    steps: int
    began_s: float
    at_s: float
    affinity: tuple[float, ...] = ()


class Left(msgspec.Struct, frozen=True, tag=True):
    """A client dropped out of its task: nothing of it will arrive."""

    client: int
    task: int
    at_s: float


class Woken(msgspec.Struct, frozen=True, tag=True):
    """The time of a :class:`Wake` has come."""

    mark: int
    at_s: float


class TrainOn(msgspec.Struct, frozen=True, tag=True):
    """A client takes the model as it now is, and ``steps`` of its own with it, in place of what it still did; then it
    sends what changed, or ``hold`` s it until it is asked. ``task`` numbers it. A step is of so many ``passes`` over
    its share of a batch. An ``anchor`` takes none: it sends the mean gradient of its passes. Steps of a ``directed``
    task begin along the server's direction, which goes to the client with the model. Of a pruned model what the mask of
    round ``mask`` keeps is sent, -1 for all; the client is ``told`` the mask if it has another. Of several heads those
    set as bits of ``heads`` are trained, 0 for all; ``measured``: the affinities of their tasks are, ahead of steps."""

    client: int
    task: int
    steps: int
    hold: bool = False
    passes: int = 1
    anchor: bool = False
    directed: bool = False
    mask: int = -1
    told: bool = False
    heads: int = 0
    measured: bool = False


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A client sends what it has at the end of its present step."""

    client: int


class Portion(msgspec.Struct, frozen=True):
    """The part of a client's task in a version: ``change`` times what it changed, and ``start`` times the model that
    it began with."""

    client: int
    task: int
    change: float
    start: float = 0.0


class Merge(msgspec.Struct, frozen=True, tag=True):
    """The model's next version: (1 - the sum of starts) times the present one, and the ``parts``. ``steps``: of
    clients, that it stands for; 0 where they are the parts' own."""

    parts: tuple[Portion, ...]
    steps: int = 0


class Keep(msgspec.Struct, frozen=True, tag=True):
    """The gradients of some anchors take the place of those that they sent before, in the mean over all clients that is
    the server's direction."""

    parts: tuple[Portion, ...]


class CutMask(msgspec.Struct, frozen=True, tag=True):
    """A round is over: the model keeps what its mask does, which is cut further if that is due."""

    number: int


class Turn(msgspec.Struct, frozen=True, tag=True):
    """It is the turn of job ``job``, whose tasks these are: it goes on with its own model, at first with the one of all
    tasks; that of the job before is kept."""

    job: int
    tasks: tuple[int, ...]


class Wake(msgspec.Struct, frozen=True, tag=True):
    """The decider wants to be told when it is ``at_s``."""

    mark: int
    at_s: float


ClientEvent = Begun | Answered | Left | Woken
ClientDecision = TrainOn | Ask | Merge | Keep | CutMask | Turn | Wake


def sampled(num_clients: int, count: int, seed: int, number: int) -> tuple[int, ...]:
    """The clients of sample `number`: `count` different ones, in order."""
    if count >= num_clients:
        return tuple(range(num_clients))
    rng = np.random.default_rng((seed, number))
    return tuple(sorted(rng.choice(num_clients, count, replace=False).tolist()))
