"""The fastest plan for a recommendation model: every way of placing its tables, each predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.answer.recommending import predict_recommending
from meshwright.cost import Costs
from meshwright.plan import Plan
from meshwright.plan.facets.embeddings import AUTO, COLUMN, NO_TOWERS, NODE, ROW, TABLE, Embeddings
from meshwright.plan.recommender_rules import recommender_violations
from meshwright.search.listed import FoundPlans, Report, best_of, quiet, values_of
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
    report: Report = quiet,
    **limits: Iterable[str],
) -> FoundPlans:
    """Predict every legal plan of :data:`SPACE`, and return the `top` best. `limits` are the restrictions of
    :func:`~meshwright.search.listed.values_of`; `report` as :func:`.best_of` takes it.

    Raises:
        MeshwrightError: R001 to R005 for restrictions; P082 where no plan is legal, with the reasons of the plainest.
    """
    plans: dict[Embeddings, Plan] = {}
    listed = [Embeddings(**values) for values in values_of(SPACE, **limits)]
    none_small = any(one.small == 0 for one in listed)
    for said in listed:
        said = said if said.way == COLUMN else msgspec.structs.replace(said, columns=Embeddings().columns)
        said = msgspec.structs.replace(said, small=0) if said.way == AUTO and none_small else said
        plans[said] = Plan(embeddings=said).on(cluster.num_devices)
    return best_of(
        plans.values(),
        check=lambda plan: recommender_violations(plan, model, cluster, work),
        predict=lambda plan: predict_recommending(model, cluster, work, plan, costs=costs),
        seconds=lambda one: one.step_time_s,
        top=top,
        report=report,
    )
