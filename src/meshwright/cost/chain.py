"""The chain itself: asks each link in turn, remembers every answer, says where it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.cost import collectives, roofline
from meshwright.cost.framework import FRAMEWORKS, Framework
from meshwright.spec.hardware import Device
from meshwright.work import Attention, Collective, Elementwise, Gemm, GroupedGemm, Work


class Estimate(NamedTuple):
    """Seconds of one work item. ``cause`` is the class its error is shared with (gemm, attention, elementwise,
    network), ``sigma`` the relative spread of that error, ``source`` the link of the chain that answered."""

    seconds: float
    cause: str
    source: str
    sigma: float


#: Relative spread (one standard deviation of the log) of the roofline against published kernels, by class. Not
#: fitted: half the gap between the best and the typical published fraction of peak for each class.
ROOFLINE_SIGMA = {"gemm": 0.10, "attention": 0.15, "elementwise": 0.15, "network": 0.20, "host": 0.40}

Link = Callable[[Work, Device], Estimate | None]


class Costs:
    """Prices work items on devices; equal items are priced once.

    `links` are asked in order before the roofline, which answers everything.
    """

    def __init__(self, framework: Framework = FRAMEWORKS["default"], links: tuple[Link, ...] = ()):
        self.framework = framework
        self._links = links
        self._known: dict[tuple[str, Work], Estimate] = {}

    def price(self, work: Work, device: Device) -> Estimate:
        key = (device.name, work)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._ask(work, device)
        return found

    def _ask(self, work: Work, device: Device) -> Estimate:
        for link in self._links:
            answer = link(work, device)
            if answer is not None:
                return answer
        return roofline_estimate(work, device)


def roofline_estimate(work: Work, device: Device) -> Estimate:
    """The last link: physics and published fractions of peak."""
    match work:
        case Gemm():
            return _estimate(roofline.gemm_seconds(work, device), "gemm")
        case GroupedGemm():
            return _estimate(roofline.grouped_gemm_seconds(work, device), "gemm")
        case Attention():
            return _estimate(roofline.attention_seconds(work, device), "attention")
        case Elementwise():
            return _estimate(roofline.elementwise_seconds(work, device), "elementwise")
        case Collective():
            return _estimate(collectives.collective_seconds(work), "network")


def _estimate(seconds: float, cause: str) -> Estimate:
    return Estimate(seconds, cause, "roofline", ROOFLINE_SIGMA[cause])
