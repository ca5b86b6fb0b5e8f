"""The fastest plan that makes images with a diffusion model: every way of dividing its devices, each predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.answer.denoising import denoising_violations, predict_denoising
from meshwright.cost import Costs
from meshwright.plan.facet import divisors
from meshwright.plan.facets.denoising import NONE
from meshwright.search.listed import FoundPlans, Report, best_of, plan_of, quiet, values_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.denoise import Denoise
from meshwright.spec.model import Model


def _space(devices: int) -> dict[str, tuple[Any, ...]]:
    """Facets that are searched, and the values of each. What changes the images (``stale=``, ``halo=``) is tried where
    it is allowed."""
    sizes = divisors(devices)
    return {
        "tp": sizes,
        "cp": sizes,
        "pp": sizes,
        "algorithm": ("ring", "ulysses", "allgather"),
        "stale": (NONE,),
        "halo": (0.0,),
    }


def find_denoising(
    model: Model,
    cluster: Cluster,
    denoise: Denoise,
    *,
    costs: Costs | None = None,
    top: int = 5,
    report: Report = quiet,
    **limits: Iterable[str],
) -> FoundPlans:
    """Predict every legal plan of the space on all devices, and return the `top` that make the images soonest. `limits`
    are the restrictions of :func:`~meshwright.search.listed.values_of`; `report` as :func:`.best_of` takes it.

    Raises:
        MeshwrightError: W019 for a model that makes no images; R001 to R005 for restrictions; P codes where no plan is
            legal, with the reasons of the plainest.
    """
    denoise.tokens(model)
    devices = cluster.num_devices
    plans = (plan_of(values, devices) for values in values_of(_space(devices), **limits))
    texts = {plan.text(): plan for plan in plans if plan is not None}
    return best_of(
        texts.values(),
        check=lambda plan: denoising_violations(model, cluster, denoise, plan),
        predict=lambda plan: predict_denoising(model, cluster, denoise, plan, costs=costs),
        seconds=lambda one: one.latency.value,
        top=top,
        report=report,
        alike=True,
    )
