"""The fastest plan for a recommendation model: every way of placing its tables, each predicted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import msgspec

from meshwright.answer.recommending import predict_recommending
from meshwright.cost import Costs
from meshwright.plan import Plan
from meshwright.plan.facets import fields
from meshwright.plan.facets.embeddings import AUTO, COLUMN, NO_TOWERS, NODE, ROW, TABLE, Embeddings
from meshwright.plan.recommender_rules import recommender_violations
from meshwright.search.listed import FoundPlans, best_of
from meshwright.search.restrict import restricted
from meshwright.search.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.recommender import Recommender
from meshwright.spec.samples import SampleBatch

#: Facets that are searched, and the values of each that keep the model as it is.
SPACE: dict[str, tuple[Any, ...]] = {
    "embeddings": (AUTO, TABLE, ROW, COLUMN),
    "columns": (2, 4, 8),
    "small": (0, 1_000, 10_000, 100_000),
    "spread": ("heaviest-first",),
    "towers": (NO_TOWERS, NODE),
    "compress": (1,),
    "pooled": ("fp32",),
}


def find_recommending(
    model: Recommender,
    cluster: Cluster,
    work: SampleBatch,
    *,
    costs: Costs | None = None,
    top: int = 5,
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> FoundPlans:
    """Predict every legal plan of :data:`SPACE` under the restrictions, and return the `top` best.

    Raises:
        MeshwrightError: R001 to R005 for restrictions; P082 where no plan is legal, with the reasons of the plainest.
    """
    forms = {name: fields()[name].form for name in SPACE}
    space = restricted(Space(domains=dict(SPACE)), fix=fix, bound=bound, exclude=exclude, allow=allow, forms=forms)
    plans: dict[Embeddings, Plan] = {}
    for values in product(*(space[name] or () for name in SPACE)):
        said = Embeddings(**dict(zip(SPACE, values)))
        said = said if said.way == COLUMN else msgspec.structs.replace(said, columns=Embeddings().columns)
        said = msgspec.structs.replace(said, small=0) if said.way == AUTO and 0 in (space["small"] or ()) else said
        plans[said] = Plan(embeddings=said).on(cluster.num_devices)
    return best_of(
        plans.values(),
        check=lambda plan: recommender_violations(plan, model, cluster, work),
        predict=lambda plan: predict_recommending(model, cluster, work, plan, costs=costs),
        seconds=lambda one: one.step_time_s,
        top=top,
    )
