"""Export: the chosen plan as a working configuration of another engine.

One file per exporter, each a pair of pure functions: ``limits`` yields what its target cannot express of a question,
``write`` gives the files. Nothing is dropped silently: a gap is an error that names it and the nearest plan, and
what the target needs and a plan does not say (data, tokenizer) is a placeholder listed in the notes.
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.export.engines import ENGINES, TARGETS, refusals
from meshwright.export.engines import exporter as exporter_of
from meshwright.export.gap import Gap, refuse
from meshwright.export.limits import all_limits
from meshwright.export.nearest_plan import nearest
from meshwright.export.request import ExportRequest
from meshwright.export.target import Target, load
from meshwright.export.written import Exported
from meshwright.plan import Plan, check
from meshwright.plan.pool import several
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

__all__ = ["ENGINES", "TARGETS", "Exported", "Gap", "ExportRequest", "Target", "export", "refusals", "target"]


def target(name: str) -> Target:
    """The target's version and keys.

    Raises:
        MeshwrightError: E002 for a name that is none; names the nearest.
    """
    exporter_of(name)
    return load(name)


def export(
    name: str, model: Model, cluster: Cluster, train: Train, plan: Plan, *, framework: str | None = ""
) -> Exported:
    """The plan as a configuration of the target called `name`.

    What cannot be expressed is refused with the nearest plan that can. It is predicted with the costs of `framework`,
    or of the target's own profile, and fits in memory where one was found; None leaves the prediction out.

    Raises:
        MeshwrightError: E002 for an unknown target; the plan's own violations when it is not legal.
        Infeasible: E001 for everything the target cannot express, with the nearest plan that it can.
    """
    exporter, about = exporter_of(name), load(name)
    if plan.several:
        raise several(tuple(pool.name for pool in plan.pools), f"an export to {about.label}")
    plan = plan.on(cluster.num_devices)
    illegal = check(plan, model, cluster, train)
    if illegal:
        raise MeshwrightError(illegal)
    request = ExportRequest(model=model, cluster=cluster, train=train, plan=plan)
    gaps = list(all_limits(exporter)(request))
    if gaps:
        instead = nearest(request, all_limits(exporter), _costs(name) if framework == "" else framework)
        raise refuse(gaps, request, instead.text(about.label) if instead else "", about.label)
    files, notes = exporter.write(request)
    return Exported(target=name, version=about.version, files=files, notes=tuple(notes))


def _costs(name: str) -> str:
    """The profile that a search for the target's plans prices them with, "" for the standard one."""
    from meshwright.export.runnable import profile

    return profile((name,))
