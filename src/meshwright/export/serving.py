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
from meshwright.export.deployment import Deployment
from meshwright.export.engines import SERVING_TARGETS, TARGETS
from meshwright.export.gap import refuse
from meshwright.export.serving_limits import mended
from meshwright.export.target import load
from meshwright.export.written import Exported
from meshwright.plan import Plan
from meshwright.plan.pool import several
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve


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
    if plan.several:
        raise several(tuple(pool.name for pool in plan.pools), f"an export to {about.label}")
    serve = serve if requests is not None else serve.for_context(model.max_seq_len)
    deployment = planned(model, cluster, serve, plan, requests if requests is not None else serve.drawn())
    gaps = list(exporter.limits(deployment))
    if gaps:
        raise refuse(gaps, deployment, mended(deployment, exporter.limits), about.label)
    files, notes = exporter.write(deployment)
    return Exported(target=name, version=about.version, files=files, notes=tuple(notes))


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
        adapters=serve.adapters.count if serve.adapters else len(np.unique(requests.adapter[requests.adapter >= 0])),
    )
