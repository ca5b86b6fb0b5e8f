"""Assignment: items with a size and a cost onto bins with a capacity, and how far from the best it may be.

Items in any order (documents onto rows, sequences onto groups of ranks, experts onto devices) are assigned by a
:class:`Method`: a record with one pure function, in a file of its own, registered by name, whose answer comes with a
bound that no assignment goes below. Layers onto stages stay in order and batches onto kinds of slices are counts; both
are solved exactly, by dynamic programming (:mod:`.partition`, :mod:`.shares`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError, nearest

#: Relative difference of a value and its bound that is rounding: what is nearer is the best.
ROUNDING = 1e-9


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """``sizes`` int64 [N], each from 1 to the largest capacity. ``capacity`` is every bin's, or each one's, int64 [B].
    ``costs`` float64, 0 or more, where they are what counts: [N], or [N, B] where bins differ in what an item costs
    there; ``start`` float64 [B], what bins cost before they have an item. ``num_bins``: how many bins there are, 0 for
    as many as it takes."""

    sizes: NDArray[np.int64]
    capacity: int | NDArray[np.int64]
    costs: NDArray[np.float64] | None = None
    num_bins: int = 0
    start: NDArray[np.float64] | None = None

    @property
    def alike(self) -> bool:
        """Whether bins are equal, so that it does not matter which of them has what."""
        return np.ndim(self.capacity) == 0 and self.start is None and (self.costs is None or self.costs.ndim == 1)

    @property
    def room(self) -> NDArray[np.int64]:
        """The capacity of each bin, int64 [B]."""
        return np.broadcast_to(np.asarray(self.capacity, np.int64), (self.num_bins,)).copy()

    @property
    def before(self) -> NDArray[np.float64]:
        """The cost of each bin before it has an item, float64 [B]."""
        return np.zeros(self.num_bins) if self.start is None else np.asarray(self.start, np.float64).copy()

    @property
    def each(self) -> NDArray[np.float64]:
        """The cost of each item on each bin, float64 [N, B]; its size where no costs are said."""
        costs = np.asarray(self.sizes if self.costs is None else self.costs, np.float64)
        costs = costs[:, None] if costs.ndim == 1 else costs
        return np.ascontiguousarray(np.broadcast_to(costs, (len(self.sizes), self.num_bins)))


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
    """A way of assigning: ``words`` say what it does, ``solve`` does it. ``spreads``: costs over a given number of
    bins."""

    name: str
    words: str
    solve: Callable[[Problem], Assigned]
    spreads: bool = True


#: Files of this package with a method each.
FILES = ("first_fit", "heaviest_first", "in_order", "enumeration", "local_search", "integer")


def methods() -> dict[str, Method]:
    """Return every method by its name."""
    found = [import_module(f"{__name__}.{file}").METHOD for file in FILES]
    return {method.name: method for method in found}


def solve(name: str, problem: Problem) -> Assigned:
    """Assign by the method of that name.

    Raises:
        MeshwrightError: R004 for a name that is none, L003 for a method whose solver is not installed.
        ValueError: everything that makes the problem none: a size that no bin holds, a cost below 0, arrays whose
            lengths are not those of the items and the bins, or no number of bins where costs are spread.
    """
    known = methods()
    if name not in known:
        raise MeshwrightError.one("R004", f"no method {name!r} of assignment", help=nearest(name, known))
    wrong = _wrong(problem, spreads=known[name].spreads)
    if wrong:
        raise ValueError("; ".join(wrong))
    return known[name].solve(problem)


def _wrong(problem: Problem, *, spreads: bool) -> list[str]:
    """Everything that makes a problem none."""
    sizes, bins, found = problem.sizes, problem.num_bins, []
    most = int(np.max(problem.capacity)) if np.size(problem.capacity) else 0
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= most:
        found.append(f"sizes are from 1 to the capacity of {most}, and these from {sizes.min()} to {sizes.max()}")
    if spreads and bins < 1:
        found.append("costs are spread over a number of bins")
    if np.ndim(problem.capacity) and len(problem.capacity) != bins:
        found.append(f"{len(problem.capacity)} capacities for {bins} bins")
    if problem.start is not None and len(problem.start) != bins:
        found.append(f"{len(problem.start)} starts for {bins} bins")
    if problem.costs is not None:
        shape = (len(sizes), bins)[: problem.costs.ndim]
        if problem.costs.shape != shape:
            found.append(f"costs of shape {problem.costs.shape} for {len(sizes)} items and {bins} bins")
        elif problem.costs.size and not problem.costs.min() >= 0:
            found.append("costs are 0 or more")
    return found


def least_load(problem: Problem, placed: NDArray[np.bool_] | None = None) -> float:
    """Return a cost that the costliest bin of no assignment of the items (those `placed`) is below: the mean, the
    costliest item where it costs least and, of equal bins, the two least of one item more than there are bins."""
    each, before = problem.each, problem.before
    each = each if placed is None else each[placed]
    if not len(each):
        return float(before.max(initial=0.0))
    cheapest = each.min(axis=1)
    alone = float((each + before).min(axis=1).max())
    found = max((float(before.sum()) + float(cheapest.sum())) / problem.num_bins, alone, float(before.max()))
    if problem.alike and len(cheapest) > problem.num_bins:
        first = np.sort(cheapest)[::-1]
        found = max(found, float(first[problem.num_bins - 1] + first[problem.num_bins]))
    return found


def assigned(problem: Problem, bin_of: NDArray[np.int64], bound: float = 0.0) -> Assigned:
    """Return an assignment with the cost of its costliest bin, and the larger of `bound` and :func:`least_load`."""
    load, has = problem.before, bin_of >= 0
    np.add.at(load, bin_of[has], problem.each[has, bin_of[has]])
    value = float(load.max())
    bound = max(bound, least_load(problem, has))
    bound = value if bound > value * (1 - ROUNDING) else bound  # sums in another order differ by rounding
    return Assigned(bin_of=bin_of, num_bins=problem.num_bins, value=value, bound=bound)
