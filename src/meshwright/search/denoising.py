"""The fastest plan that makes images with a diffusion model: every way of dividing its devices, each predicted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import msgspec

from meshwright.answer.denoising import denoising_violations, predict_denoising
from meshwright.cost import Costs
from meshwright.plan import Plan
from meshwright.plan.facet import divisors
from meshwright.plan.facets import fields
from meshwright.plan.facets.denoising import NONE
from meshwright.search.listed import FoundPlans, best_of
from meshwright.search.restrict import restricted
from meshwright.search.space import Space
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
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> FoundPlans:
    """Predict every legal plan of the space under the restrictions on all devices, and return the `top` that make the
    images soonest.

    Raises:
        MeshwrightError: W019 for a model that makes no images; R001 to R005 for restrictions; P codes where no plan is
            legal, with the reasons of the plainest.
    """
    denoise.tokens(model)
    devices = cluster.num_devices
    first = _space(devices)
    forms = {name: fields()[name].form for name in first}
    space = restricted(Space(domains=first), fix=fix, bound=bound, exclude=exclude, allow=allow, forms=forms)
    plans: dict[str, Plan] = {}
    for values in product(*(space[name] or () for name in first)):
        plan = Plan()
        for name, value in zip(first, values):
            field = fields()[name]
            record = msgspec.structs.replace(getattr(plan, field.facet), **field.sets(value))
            plan = msgspec.structs.replace(plan, **{field.facet: record})
        layout = plan.layout
        if devices % (layout.tp * layout.cp * layout.pp) == 0:
            plan = plan.on(devices)
            plans[plan.text()] = plan
    return best_of(
        plans.values(),
        check=lambda plan: denoising_violations(model, cluster, denoise, plan),
        predict=lambda plan: predict_denoising(model, cluster, denoise, plan, costs=costs),
        seconds=lambda one: one.latency.value,
        top=top,
        alike=True,
    )
