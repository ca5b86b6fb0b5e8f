"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983) over the facets of a plan. Nothing is proven.

A neighbour takes one part of the plan (its sizes, its inner, piped or state part) from the space at random; parts that
are not legal with new sizes are drawn again. A plan that does not fit counts as slower by what it lacks. The seed is
fixed: the same question walks the same way.
"""

from __future__ import annotations

from math import exp, inf

import numpy as np

from meshwright.search.bounds import CoreScope
from meshwright.search.evaluate import Evaluated
from meshwright.search.legal import legal
from meshwright.search.space import Core
from meshwright.search.walk import UNRUNNABLE, Walk

STEPS, RESTARTS = 400, 4
#: Relative step time by which a move may be worse with probability 1/e, at the start and at the end.
HOT, COLD = 0.3, 0.002
SEED = 0


def run(walk: Walk) -> bool:
    """Walk at random, colder and colder; False, as most of the space is never seen."""
    rng = np.random.default_rng(SEED)
    parts = _Parts(walk)
    if not parts.cores:
        return True
    walk.covers(parts.size())
    for _ in range(RESTARTS):
        point = parts.draw(rng)
        while not parts.together(point):
            point = parts.draw(rng)
        energy = _energy(walk, walk.evaluate(*point))
        for step in range(STEPS):
            heat = HOT * (COLD / HOT) ** (step / STEPS)
            moved = parts.neighbour(rng, point)
            if not parts.together(moved):
                continue
            after = _energy(walk, walk.evaluate(*moved))
            if after <= energy or rng.random() < exp((energy - after) / energy / heat):
                point, energy = moved, after
            if walk.stopped:
                return False
    walk.reject("not looked at: the walk did not come by", max(0, walk.covered - len(walk.tried)))
    return False


def _energy(walk: Walk, answer: Evaluated) -> float:
    if answer == UNRUNNABLE:
        return inf
    lacks = max(0.0, walk.wanted.room_bytes - answer.headroom_bytes) / walk.capacity_bytes
    return answer.step_time_s * (1 + 4 * lacks)


class _Parts:
    """The parts that go with each core, listed when they are first drawn from."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self._known: dict[Core, CoreScope] = {}
        self.cores = [core for core in walk.cores if self.of(core).size()]

    def of(self, core: Core) -> CoreScope:
        found = self._known.get(core)
        if found is None:
            walk = self.walk
            found = self._known[core] = CoreScope.of(walk.space, core, walk.trained, walk.cluster, walk.train)
        return found

    def together(self, point: tuple) -> bool:
        """Whether a point's parts go together."""
        return legal(*point, self.of(point[0]).states, self.walk.trained.num_layers)

    def size(self) -> int:
        """Legal points."""
        return sum(self.of(core).size() for core in self.cores)

    def draw(self, rng: np.random.Generator) -> tuple:
        core = self.cores[rng.integers(len(self.cores))]
        return core, *(part[rng.integers(len(part))] for part in self._of(core))

    def _of(self, core: Core) -> tuple:
        """The inner, piped and state parts of a core."""
        scope = self.of(core)
        return scope.inners, scope.pipelines, scope.states

    def neighbour(self, rng: np.random.Generator, point: tuple) -> tuple:
        """The point with one part drawn anew; of new sizes, those that differ from the old ones least often."""
        which = int(rng.integers(4))
        if which:
            choices = self._of(point[0])[which - 1]
            return (*point[:which], choices[rng.integers(len(choices))], *point[which + 1 :])
        near = [c for c in self.cores if sum(a != b for a, b in zip(c, point[0])) <= 2] or self.cores
        core = near[rng.integers(len(near))]
        kept = (old if old in part else part[rng.integers(len(part))] for old, part in zip(point[1:], self._of(core)))
        return core, *kept
