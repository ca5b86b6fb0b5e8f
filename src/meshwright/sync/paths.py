"""Paths: replicas whose models are made of modules, one of several at each level, which those that share one average
apart from all others (DiPaCo, Douillard et al. 2403.10616).

A level is a run of neighbouring layers; the embedding is of the first and the head of the last, but a table that both
use is one module that all share. ModulePaths are numbered with the last level fastest, and replicas of one path are
neighbours. Each path trains on the sequences that are routed to it by their first tokens.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING

import msgspec

from meshwright.sync.fragments import EVERY, TIED, Among, Fragment

if TYPE_CHECKING:
    from meshwright.sync.record import SyncPolicy

#: Beginning of the names of groups that share a module of a level.
MODULE = "module"
#: Features that are clustered: mean hidden states of the model that a run begins with, or the pixels of samples.
HIDDEN, PIXELS = "hidden", "pixels"


class ModulePaths(msgspec.Struct, frozen=True, kw_only=True):
    """Models of ``levels`` with so many modules each, () where every replica's model is its own; ``prefix``: the
    tokens of a sequence that it is routed by, and that nothing is learnt of. ``rescaled``: a module's change is
    longer by the root of the number of paths through it. ``mixed``: what is predicted is weighed over all paths, not
    taken of one. Each sequence is of as many of the nearest paths as ``overlap`` says when they train. ``features``:
    what k-means tells labelled samples apart by, mean hidden states or pixels."""

    levels: tuple[int, ...]
    prefix: int
    rescaled: bool = False
    mixed: bool = False
    overlap: int = 1
    features: str = HIDDEN

    def count(self, replicas: int) -> int:
        """Return the number of paths."""
        return prod(self.levels) if self.levels else replicas

    def path_of(self, replica: int, replicas: int) -> int:
        """Return the path of a replica."""
        return replica * self.count(replicas) // replicas

    def level_of(self, layer: int, num_layers: int) -> int:
        """Return the level of a layer of the model."""
        return layer * len(self.levels) // num_layers

    def block(self, level: int, replicas: int) -> int:
        """Return how many neighbouring replicas hold the same module of a level."""
        return replicas // prod(self.levels[: level + 1])

    def modules(self, level: int, replicas: int) -> list[tuple[int, ...]]:
        """Return the replicas that hold each module of a level."""
        block, size = self.block(level, replicas), self.levels[level]
        return [tuple(r for r in range(replicas) if r // block % size == module) for module in range(size)]

    def through(self, level: int) -> int:
        """Return the number of paths through a module of a level."""
        return prod(self.levels) // self.levels[level]


def moduled(f: Fragment, policy: SyncPolicy, level: int) -> Fragment:
    """Return a fragment of a level's layers as it is exchanged: among those that hold the module."""
    paths = policy.paths
    if paths is None or f.due != EVERY:
        return f
    through = prod(paths.levels) if f.kind == TIED else paths.through(level)
    among = f.replica if f.kind == TIED else Among(f"{MODULE}{level}", f.replica.size // paths.levels[level])
    longer = sqrt(through) if paths.rescaled else 1.0
    outer = msgspec.structs.replace(policy.outer, rate=policy.outer.rate * longer)
    return msgspec.structs.replace(f, replica=among, outer=outer)
