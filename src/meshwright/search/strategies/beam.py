"""Beam search (Lowerre, 1976): the most promising cores, and of each the plans with the lowest bounds.

For spaces too large to bound in full: ``WIDTH`` cores by a guess at their step time are bounded as the exhaustive
search does, and ``WIDTH`` plans of each are evaluated, the lowest bound first. Nothing is proven.
"""

from __future__ import annotations

import numpy as np

from meshwright.search.strategies.exhaustive import bounded_region, promise, scopes
from meshwright.search.walk import Walk

WIDTH = 32
OUTSIDE = "not looked at: outside the beam"


def run(walk: Walk) -> bool:
    """Walk the beam; False, as what lies outside it is unknown."""
    regions = walk.regions
    ordered = sorted(scopes(walk, regions), key=lambda found: promise(walk, *found))
    for _, scope in ordered[WIDTH:]:
        walk.reject(OUTSIDE, scope.size())
    for _, scope in ordered[:WIDTH]:
        region = bounded_region(walk, regions, scope)
        if region is None:
            continue
        left = np.flatnonzero(np.isfinite(region.bound_s.ravel()))
        lowest = left[np.argsort(region.bound_s.flat[left], kind="stable")]
        walk.reject(OUTSIDE, len(lowest[WIDTH:]))
        for leaf in lowest[:WIDTH].tolist():
            walk.evaluate(*region.part(leaf))
            if walk.stopped:
                return False
    return False
