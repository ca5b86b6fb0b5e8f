"""Parts that answers about images, recommendation models and graphs have in common: times with their intervals, memory
of ranks, and the plain values that every one of them says."""

from __future__ import annotations

from math import exp
from statistics import NormalDist
from typing import Any, Protocol

import msgspec

from meshwright.answer.intervals import LEAST_SIGMA
from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import FORMAT_VERSION, Assumption, RankMemory
from meshwright.cost import Costs
from meshwright.plan import Plan
from meshwright.spec.cluster import Cluster

#: Quantile of an 80% interval in standard deviations.
OUTER = NormalDist().inv_cdf(0.9)


class WholeAnswer(Protocol):
    """An answer that says its question, whether it fits, and what it rests on."""

    model: Any
    cluster: Cluster
    plan: Plan
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]

    @property
    def fits(self) -> bool: ...

    @property
    def peak_memory_bytes(self) -> float: ...


def timed(seconds: float, sigma: float, costs: Costs) -> Metric:
    """Return seconds with their 80% interval: `sigma` is the relative error of what was priced, where the framework's
    whole steps and repeats of one step are no surer."""
    sigma = max(LEAST_SIGMA, sigma, costs.framework.step_sigma)
    return Metric(seconds, (seconds * exp(-OUTER * sigma), seconds * exp(OUTER * sigma)))


def rank_memory(name: str, multiplicity: int, held: dict[str, float], cluster: Cluster) -> RankMemory:
    """Return the memory of so many ranks that hold the same from the beginning to the end, in bytes by category."""
    alive = {name: size for name, size in held.items() if size}
    return RankMemory(
        rank=name,
        multiplicity=multiplicity,
        capacity_bytes=float(cluster.islands[0].device.memory_bytes),
        peak_bytes=sum(alive.values()),
        at_s=0.0,
        alive=alive,
    )


def plain(answer: WholeAnswer) -> dict[str, Any]:
    """Return what every such answer says as plain values."""
    return {
        "format_version": FORMAT_VERSION,
        "model": answer.model.name,
        "cluster": answer.cluster.name,
        "plan": answer.plan.text(),
        "fits": answer.fits,
        "peak_memory_bytes": answer.peak_memory_bytes,
        "assumptions": msgspec.to_builtins(answer.assumptions),
        "warnings": list(answer.cautions),
    }


def limits(name: str, metric: Metric) -> dict[str, Any]:
    """Return a metric in seconds as ``name_s`` and ``name_interval_s``."""
    return {f"{name}_s": metric.value, f"{name}_interval_s": list(metric.interval or (metric.value, metric.value))}
