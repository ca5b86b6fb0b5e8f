"""The chain as shipped: what was measured on this very machine, what the catalog has fitted for a device or a fabric,
else the roofline."""

from __future__ import annotations

from meshwright.cost import exchange, fitted, measured, network
from meshwright.cost.chain import Costs
from meshwright.cost.framework import Framework, load
from meshwright.cost.unknown import software
from meshwright.spec.cluster import Cluster


def standard(framework: Framework | None = None, *, without: str = "") -> Costs:
    """Costs with every profile of the catalog but those of the device `without`; `framework` defaults to the flagged
    ``default`` profile."""
    framework = framework or load("default")
    usual = framework.defaults
    links = (
        measured.price,
        exchange.link(usual.dispatch, usual.dispatch_from),
        network.link,
        fitted.link(flash=usual.flash, without=without),
    )
    return Costs(framework, links, profile="catalog profiles, else roofline")


def standard_on(cluster: Cluster, framework: str = "", dtype: str = "bf16") -> Costs:
    """:func:`standard` with the framework profile of a name; where none is said, with the one that the cluster's device
    names, if it names one, else with the middle of the kinds of stack that compute in `dtype` there.

    Raises:
        MeshwrightError: the profile is not there, as :func:`meshwright.cost.framework.load` says.
    """
    return standard(software(cluster, framework, dtype))


#: What serving engines run between kernels: nothing that is priced by the kernel. Pointwise chains are fused, and what
#: the host adds to an iteration is the engine profile's.
BARE = Framework(
    name="serving",
    elementwise_passes=1.0,
    host_us_per_kernel=0.0,
    host_us_per_collective=0.0,
    host_us_per_pass=0.0,
    source="kernels of serving engines: fused, and issued from graphs",
)


def serving_costs(library: str = "vllm") -> Costs:
    """Costs of serving: attention that also writes the cache, products of experts in one kernel, and the collectives of
    a serving `library` (one-shot all-reduces of small buffers; the fastest kernels for tokens of experts)."""
    kernels = fitted.link(serving=True, fused=True, fastest=True, library=library)
    links = (measured.price, exchange.served, network.Network(library=library), kernels)
    return Costs(BARE, links, profile="catalog profiles of serving kernels, else roofline")
