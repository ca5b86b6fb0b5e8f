"""Programs: what a task of the step graph does, with every decision made.

A program is the only cost key. It holds operators, bytes and groups, and the device it runs on, so that it is priced
without the plan it comes from (``simulate/price.py``). Equal programs are one key of a graph.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import msgspec

from meshwright.lower.entry import Entry
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Group, Staging, Work


class LayerPass(msgspec.Struct, frozen=True, eq=False):
    """A pass (``F``, ``B``, ``W``, ``BW``) over one layer: its operators on their queues. There is one object for
    equal ones of a plan, or of a search, so that it is compared and looked up by identity."""

    which: str
    entries: tuple[Entry, ...]


class Site(msgspec.Struct, frozen=True, eq=False):
    """A device, and the number of ranks that wait for one another in a step; one object for equal ones of a plan."""

    device: Device
    num_ranks: int

    @property
    def straggling(self) -> float:
        """The straggler factor: time of the slowest of the step's devices over that of a median one."""
        return self.device.slowest_of(self.num_ranks)


class Move(NamedTuple):
    """A collective over ``num_bytes`` in ``times`` equal messages. ``sharded``: of parameters, fully sharded and
    exchanged by ``layers`` in every microbatch, or gathered together ``late``, after the update; software has rates of
    its own for both."""

    op: str
    num_bytes: float
    group: Group
    times: int = 1
    sharded: str = ""

    @property
    def work(self) -> Collective:
        """One of the collective's messages, as a work item."""
        return Collective(op=self.op, num_bytes=self.num_bytes / self.times, group=self.group)


def in_pieces(moves: tuple[Move, ...], most_bytes: float) -> tuple[Move, ...]:
    """The collectives in messages of at most so many bytes each."""
    return tuple(move._replace(times=max(move.times, ceil(move.num_bytes / most_bytes))) for move in moves)


class Program(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A task's work at one ``site``. ``kind`` says which part is filled:

    * ``pass``: ``layers`` one after the other, with ``beside`` the exchanges overlapped with them, ``copies`` around
      those of fully sharded parameters, ``share`` the part of a stage's pass that this is, and ``work`` the update of
      its layers where it ends with one;
    * ``send`` and ``exchange``: ``moves`` one after the other, and ``work``, where they are encoded and decoded;
    * ``transfer``: ``work``, what moves between tiers of memory or is computed by the host (``which``: an ``update`` of
      a ``share`` of the rank's parameters, or a ``sum``);
    * ``update``: ``work``, the optimizer's or a code's, whose ``products`` come besides.

    ``name`` is for people, and says the pass and the layers. ``every``: the task is one of every so many steps, of
    those in which this ``part`` of the layers is due; ``applies`` what was sent ``lag`` steps before. ``yields``: each
    message of an exchange lets exchanges of experts' tokens go before it, where they share a port. ``clocked``: the
    task is due when clocks of replicas say so, which no step knows.
    """

    kind: str
    name: str
    site: Site
    which: str = ""
    layers: tuple[LayerPass, ...] = ()
    beside: tuple[Program, ...] = ()
    copies: tuple[Staging, ...] = ()
    share: float = 1.0
    moves: tuple[Move, ...] = ()
    work: Work | None = None
    products: tuple[Work, ...] = ()
    every: float = 1
    part: int = 0
    lag: int = 0
    applies: bool = False
    yields: bool = False
    clocked: bool = False

    @property
    def rare(self) -> bool:
        """Whether it is one of several steps that has the task, or another one waits for it."""
        return self.every > 1 or self.lag > 0 or self.clocked
