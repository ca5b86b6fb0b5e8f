"""What a region's parts cost, as columns: seconds and bytes of inner parts, of state parts, and of layers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.lower.layer import Entry
from meshwright.lower.units import Unit
from meshwright.spec.architecture import EMBEDDING, HEAD


class Costs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Inner parts of a core as columns, A rows. Units U: the kinds of blocks, then the embedding and the head.

    ``each`` [D, 4, A, U] seconds of the passes F, BW, B, W on each kind of device, where it is fastest, infinite where
    no rank computes on it; ``slowest`` [4, A, U] where any rank is slowest; ``send`` [A] of a message between
    neighbouring ranks; ``saved``, ``held`` and ``working`` [A, U] bytes of a microbatch (``lower/state.py``).
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

    def rows(self, chosen: np.ndarray) -> Costs:
        """Some of the inner parts."""
        return Costs(
            each=self.each[:, :, chosen],
            slowest=self.slowest[:, chosen],
            send=self.send[chosen],
            saved=self.saved[chosen],
            held=self.held[chosen],
            working=self.working[chosen],
        )


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """State parts of a core as columns, for A inner parts and C state parts; seconds.

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
    """Layers without their place on the cluster: seconds of ``kernels`` [D, 4, U] on each kind of device in the passes
    F, BW, B, W, and ``core`` [D, U] of what selective recompute repeats; and the collectives that F and B of each unit
    wait for. ``number`` is its place among others."""

    number: int
    kernels: np.ndarray
    core: np.ndarray
    waited: Waited


def units_of(kinds: int, recompute: str) -> tuple[Unit, ...]:
    """The units in the order of the columns: the kinds of blocks, the embedding, the head."""
    return (*(Unit(kind, recompute) for kind in range(kinds)), Unit(EMBEDDING, "none"), Unit(HEAD, "none"))


def spread(each: np.ndarray, amount: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Seconds [...] that some rank takes at least, however work is dealt to unequal ranks: `each` [D, ..., U] seconds
    of a unit on each kind of device, `amount` [U] units, `ranks` [D] on each. Any weights of the ranks that sum to 1
    bound it (the weighted mean is no more than the largest); these are their speeds at the whole."""
    there = ranks > 0
    each, ranks = each[there], ranks[there]
    speed = 1.0 / (each @ amount)  # [D, ...]
    weight = speed / np.tensordot(ranks, speed, axes=1)
    return (weight[..., None] * each).min(axis=0) @ amount


def waited_for(passes: Iterable[Iterable[Iterable[Entry]]], algorithm: str) -> Waited:
    """The collectives that run one after the other with the kernels of some passes over each unit: not those of a ring,
    which run beside it, and not those inside an expert, whose group is another."""
    counted = [
        [
            Counter(
                (e.queue, e.work.op, e.work.num_bytes)
                for e in entries
                if e.queue != "compute" and not (e.queue == "cp" and algorithm == "ring") and " etp" not in e.name
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
