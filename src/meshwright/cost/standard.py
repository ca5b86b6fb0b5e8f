"""The chain as shipped: what was measured on this very machine, what the catalog has fitted for a device or a fabric,
else the roofline."""

from __future__ import annotations

from meshwright.cost import exchange, fitted, measured, network
from meshwright.cost.chain import Costs
from meshwright.cost.framework import Framework, load
from meshwright.spec.cluster import Cluster


def standard(framework: Framework | None = None) -> Costs:
    """Costs with every profile of the catalog; `framework` defaults to the flagged ``default`` profile."""
    framework = framework or load("default")
    usual = framework.defaults
    links = (
        measured.price,
        exchange.link(usual.dispatch, usual.dispatch_from),
        network.link,
        fitted.link(flash=usual.flash),
    )
    return Costs(framework, links, profile="catalog profiles, else roofline")


def standard_on(cluster: Cluster, framework: str = "") -> Costs:
    """:func:`standard` with the framework profile of a name; where none is said, with the one that the cluster's device
    names, if it names one.

    Raises:
        MeshwrightError: the profile is not there, as :func:`meshwright.cost.framework.load` says.
    """
    named = framework or cluster.islands[0].device.framework
    return standard(load(named) if named else None)
