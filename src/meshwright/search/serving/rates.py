"""A sweep of the rate: the best plan for each of several rates of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.search.serving.evaluate import at_speed, rate_of
from meshwright.search.serving.found import ServingFound
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve


class AtRate(NamedTuple):
    """A rate in requests a second, and the answer at it."""

    rate: float
    found: ServingFound


class RateSweep(msgspec.Struct, frozen=True, kw_only=True):
    """The answers by rate, the lowest first. ``stopped``: somebody ended it before all were searched."""

    points: tuple[AtRate, ...]
    stopped: bool

    @property
    def good(self) -> bool:
        """Whether a plan was found at every rate."""
        return not self.stopped and all(one.found.good for one in self.points)

    def to_json(self) -> dict[str, Any]:
        """The sweep as plain values."""
        return {
            "format_version": 1,
            "good": self.good,
            "stopped": self.stopped,
            "rates": [{"rate_req_per_s": one.rate, **one.found.to_json()} for one in self.points],
        }


def sweep_rates(
    rates: Sequence[float],
    serve: Serve,
    requests: Requests,
    find: Callable[[Serve, Requests], ServingFound],
) -> RateSweep:
    """Search at each of `rates`; `find` searches for requests that come faster or slower than they do, and are the same
    otherwise.

    Raises:
        MeshwrightError: R014 where requests come at no rate.
    """
    base = rate_of(requests)
    if not isfinite(base) or requests.concurrency:
        help = "say rate= or trace=, or leave --rates out"
        raise MeshwrightError.one("R014", "rates cannot be told: requests come at no rate", place="--rates", help=help)
    points: list[AtRate] = []
    for rate in sorted(rates):
        found = find(at_speed(serve, rate / base), requests.faster(rate / base))
        points.append(AtRate(rate, found))
        if found.stopped:
            break
    return RateSweep(points=tuple(points), stopped=points[-1].found.stopped)
