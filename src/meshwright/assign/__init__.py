"""Assignment: items with a size and a cost onto bins with a capacity, and how far from the best it may be.

Items in any order (documents onto rows and microbatches) are assigned by a :class:`Method`: a record with one pure
function, in a file of its own, registered by name, whose answer comes with a bound that no assignment goes below.
Layers onto stages stay in order and batches onto kinds of slices are counts; both are solved exactly, by dynamic
programming (:mod:`.partition`, :mod:`.shares`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError, nearest


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """``sizes`` int64 [N], each from 1 to ``capacity``, which is every bin's; ``costs`` float64 [N], 0 or more, where
    they are what counts; ``num_bins``: how many bins there are, 0 for as many as it takes."""

    sizes: NDArray[np.int64]
    capacity: int
    costs: NDArray[np.float64] | None = None
    num_bins: int = 0


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """``bin_of`` int64 [N] is the bin of each item, -1 where none has room for it. ``value`` is what was made small
    (the number of bins, or the cost of the costliest) and ``bound`` what no assignment of the same items gets below."""

    bin_of: NDArray[np.int64]
    num_bins: int
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """The optimality gap, value over bound less 1: 0.02 is 2%."""
        return self.value / self.bound - 1.0 if self.bound else 0.0


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A way of assigning: ``words`` say what it does, ``solve`` does it."""

    name: str
    words: str
    solve: Callable[[Problem], Assigned]


#: Files of this package with a method each.
FILES = ("first_fit", "heaviest_first")


def methods() -> dict[str, Method]:
    """Return every method by its name."""
    found = [import_module(f"{__name__}.{file}").METHOD for file in FILES]
    return {method.name: method for method in found}


def solve(name: str, problem: Problem) -> Assigned:
    """Assign by the method of that name.

    Raises:
        MeshwrightError: R004 for a name that is none.
        ValueError: a size that is not between 1 and the capacity, or a cost below 0.
    """
    known = methods()
    if name not in known:
        raise MeshwrightError.one("R004", f"no method {name!r} of assignment", help=nearest(name, known))
    if len(problem.sizes) and not 1 <= problem.sizes.min() <= problem.sizes.max() <= problem.capacity:
        raise ValueError(f"sizes are from 1 to the capacity of {problem.capacity}")
    if problem.costs is not None and len(problem.costs) and not problem.costs.min() >= 0:
        raise ValueError("costs are 0 or more")
    return known[name].solve(problem)
