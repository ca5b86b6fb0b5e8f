"""Export of a serving question: the plan, the engine's words and the routing as files of a serving engine.

One file per exporter, each a pair of pure functions as those of training plans (:mod:`meshwright.export`): ``limits``
yields what its target cannot express, ``write`` gives the files. What was predicted is what is written: where the cache
of the engine is said by a share of memory, the share is that of the predicted cache.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np

from meshwright.answer.serving import predict_serving
from meshwright.errors import MeshwrightError, nearest
from meshwright.export.deployment import Deployment, ServedPart, printable
from meshwright.export.engines import SERVING_TARGETS, TARGETS
from meshwright.export.gap import Gap, refuse
from meshwright.export.serving_limits import mended
from meshwright.export.target import load
from meshwright.export.written import Exported
from meshwright.plan import Plan
from meshwright.plan.serving_roles import role
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Targets that are told of pools that compute prompts, or go on with them.
APART = ("dynamo",)


def server(name: str) -> ModuleType:
    """The module that writes a serving target.

    Raises:
        MeshwrightError: E002 for a name that is none, with the nearest, and for a target of training plans.
    """
    if name not in SERVING_TARGETS:
        trains = f"it trains: say --train in place of --serve; what serves: {', '.join(SERVING_TARGETS)}"
        help = trains if name in TARGETS else nearest(name, tuple(SERVING_TARGETS))
        raise MeshwrightError.one("E002", f"no export of serving to {name!r}", place=f"--to {name}", help=help)
    return import_module(f"meshwright.export.{SERVING_TARGETS[name]}")


def export_serving(
    name: str, model: Model, cluster: Cluster, serve: Serve, plan: Plan, *, requests: Requests | None = None
) -> Exported:
    """The serving question as files of the target called `name`; `requests` where they were drawn before.

    Raises:
        MeshwrightError: E002 for an unknown target; everything that a prediction of the question would refuse.
        Infeasible: E001 for everything that the target cannot express, with the nearest question that it can.
    """
    exporter, about = server(name), load(name)
    requests = requests if requests is not None else serve.drawn()
    if plan.several:
        files, notes = _apart(name, model, cluster, serve, plan, requests)
        return Exported(target=name, version=about.version, files=files, notes=tuple(notes))
    deployment = planned(model, cluster, serve, plan, requests)
    gaps = list(exporter.limits(deployment))
    if gaps:
        raise refuse(gaps, deployment, mended(deployment, exporter.limits), about.label)
    files, notes = exporter.write(deployment)
    return Exported(target=name, version=about.version, files=files, notes=tuple(notes))


def _apart(
    name: str, model: Model, cluster: Cluster, serve: Serve, plan: Plan, requests: Requests
) -> tuple[dict[str, str], list[str]]:
    """Return (files, notes) of a plan whose pools compute prompts, or go on with them."""
    exporter, about = server(name), load(name)
    found = predict_serving(model, cluster, serve, plan, requests=requests, detail=False)
    plan, pools = plan.on(cluster.num_devices), {one.name: one for one in found.pools}
    parts = [
        ServedPart(
            name=pool.name,
            role=role(plan, pool.name),
            deployment=Deployment(
                model=model,
                cluster=cut(cluster, *pool.devices),
                serve=serve,
                plan=pool.plan,
                memory=found.tightest,
                blocks=pools[pool.name].kv_blocks if pool.name in pools else 0,
                longest=int(requests.prompt.max()),
                adapters=_adapters(serve, requests),
            ),
        )
        for pool in plan.pools
    ]
    whole = Gap(
        facet="plan.pools",
        value=f"{len(parts)} pools",
        reason="its files are of replicas that are all alike",
        help=f"export to {' or '.join(APART)}, or say a plan of one pool",
    )
    gaps = [whole] if name not in APART else list(exporter.limits_apart(parts))
    gaps += [gap for part in parts for gap in exporter.limits(part.deployment) if name in APART]
    if gaps:
        raise refuse(gaps, parts[0].deployment, "", about.label)
    line = f"{model.name} on {cluster.name}, {serve.text()}, plan {plan.text()}"
    return exporter.write_apart(parts, printable(line))


def _adapters(serve: Serve, requests: Requests) -> int:
    """The low-rank adapters that requests need."""
    return serve.adapters.count if serve.adapters else len(np.unique(requests.adapter[requests.adapter >= 0]))


def planned(model: Model, cluster: Cluster, serve: Serve, plan: Plan, requests: Requests) -> Deployment:
    """Return the question with what is predicted of its memory.

    Raises:
        MeshwrightError: everything that is wrong with the question, as :func:`predict_serving` says.
    """
    found = predict_serving(model, cluster, serve, plan, requests=requests, detail=False)
    return Deployment(
        model=model,
        cluster=cluster,
        serve=found.serve,
        plan=plan.on(cluster.num_devices),
        memory=found.tightest,
        blocks=found.kv_blocks,
        longest=int(requests.prompt.max()),
        adapters=_adapters(serve, requests),
    )
