"""Columns: the costs of all plans of a region as numpy arrays, in seconds and bytes.

A region is the plans with one *core* (sizes of the mesh, microbatch). Each combines an *inner part* (recompute,
kernels, order of the axes), a pipeline and a *state part* (ZeRO); inner and state parts are priced apart, a row each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.lower.entry import Entry
from meshwright.lower.units import Unit
from meshwright.plan.facets.sequence import RINGS, STORING
from meshwright.spec.architecture import EMBEDDING, HEAD


class CoreColumns(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The costs of the A inner parts of a core, for U units (the kinds of blocks, then the embedding and the head) and
    D kinds of devices.

    ``each`` [D, 4, A, U]: seconds of the passes F, BW, B, W on the fastest rank of each kind of device, infinite where
    no rank computes on it. ``slowest`` [4, A, U]: seconds on the slowest rank of all. ``send`` [A]: seconds of a
    message between neighbouring ranks. Bytes of a microbatch [A, U] (``lower/state.py``): ``saved`` for the backward,
    ``held`` of them until W, and the workspace of a pass, ``working``.
    """

    each: np.ndarray
    slowest: np.ndarray
    send: np.ndarray
    saved: np.ndarray
    held: np.ndarray
    working: np.ndarray

    @cached_property
    def seconds(self) -> np.ndarray:
        """[4, A, U] on the fastest device."""
        return self.each[0] if len(self.each) == 1 else self.each.min(axis=0)

    @cached_property
    def whole(self) -> np.ndarray:
        """Forward and backward [D, A, U] at least."""
        return self.each[:, 0] + np.minimum(self.each[:, 1], self.each[:, 2] + self.each[:, 3])

    def rows(self, chosen: np.ndarray) -> CoreColumns:
        """Some of the inner parts."""
        return CoreColumns(
            each=self.each[:, :, chosen],
            slowest=self.slowest[:, chosen],
            send=self.send[chosen],
            saved=self.saved[chosen],
            held=self.held[chosen],
            working=self.working[chosen],
        )


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of data parallelism's exchanges in a core, for A inner parts and C state parts.

    ``gather`` and ``reduce`` [A, C, kinds] of one block's parameters and gradients; ``first`` [A, C] gathers the first
    block with the embedding; ``last`` [A, C] is the gradient norm and the optimizer of a mean rank.
    """

    gather: np.ndarray
    reduce: np.ndarray
    first: np.ndarray
    last: np.ndarray


#: By queue, for some passes and each unit: (operation, bytes, how often).
Waited = dict[str, list[list[list[tuple[str, float, int]]]]]


class Alone(NamedTuple):
    """The costs of layers wherever on the cluster they are: seconds of ``kernels`` [D, 4, U] on each kind of device in
    the passes F, BW, B, W, and of the attention ``core`` [D, U], which selective recompute repeats; and the collectives
    that F and B of each unit wait for. ``number`` is its place among others."""

    number: int
    kernels: np.ndarray
    core: np.ndarray
    waited: Waited


def units_of(kinds: int, recompute: str) -> tuple[Unit, ...]:
    """The units in the order of the columns: the kinds of blocks, the embedding, the head."""
    return (*(Unit(kind, recompute) for kind in range(kinds)), Unit(EMBEDDING, "none"), Unit(HEAD, "none"))


def spread(each: np.ndarray, amount: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return a lower bound [...] in seconds of the busiest rank, however units are assigned to unequal ranks.

    `each` [D, ..., U] are the seconds of a unit on each kind of device, `amount` [U] the units, `ranks` [D] the ranks
    on each kind. A weighted mean of the ranks is no more than the largest, whatever weights sum to 1; these are the
    speeds of the ranks at the whole work."""
    there = ranks > 0
    each, ranks = each[there], ranks[there]
    whole_s = each @ amount  # [D, ...]
    speed = 1.0 / np.where(whole_s > 0, whole_s, 1.0)  # units of no work bound nothing, whatever the weights
    weight = speed / np.tensordot(ranks, speed, axes=1)
    return (weight[..., None] * each).min(axis=0) @ amount


def waited_for(passes: Iterable[Iterable[Iterable[Entry]]], algorithm: str) -> Waited:
    """Return the exposed collectives of some passes over each unit, those that wait for the kernels: not those of a
    ring, which are overlapped with what it is around, and not those inside an expert, whose group is another."""
    counted = [
        [
            Counter(
                (e.queue, e.work.op, e.work.num_bytes)
                for e in entries
                if e.queue != "compute"
                and e.work.op != "send"
                and not (e.queue == "cp" and algorithm in (*RINGS, STORING))
                and " etp" not in e.name
            )
            for entries in units
        ]
        for units in passes
    ]
    queues = dict.fromkeys(what[0] for units in counted for unit in units for what in unit)
    return {
        queue: [
            [[(*what[1:], n) for what, n in unit.items() if what[0] == queue] for unit in units] for units in counted
        ]
        for queue in queues
    }
