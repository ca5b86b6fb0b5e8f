"""The chain as shipped: what the catalog has fitted for a device or a fabric, else the roofline."""

from __future__ import annotations

from meshwright.cost import fitted, network
from meshwright.cost.chain import Costs
from meshwright.cost.framework import Framework


def standard(framework: Framework | None = None) -> Costs:
    """Costs with every profile of the catalog; `framework` defaults to the flagged ``default`` profile."""
    flash = framework.defaults.flash if framework is not None else 0
    return Costs(framework, (network.link, fitted.link(flash=flash)), profile="catalog profiles, else roofline")
