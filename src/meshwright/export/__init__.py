"""Export: the chosen plan as a working configuration of another engine.

One file per exporter, each a pair of pure functions: ``limits`` yields what its target cannot express of a question,
``write`` gives the files. Nothing is dropped silently: a gap is an error that names it and the nearest plan, and
what the target needs and a plan does not say (data, tokenizer) is a placeholder listed in the notes.
"""

from __future__ import annotations

import shlex

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.export import launch
from meshwright.export.engines import ENGINES, TARGETS, refusals
from meshwright.export.engines import exporter as exporter_of
from meshwright.export.gap import Gap, refuse
from meshwright.export.nearest_plan import nearest
from meshwright.export.request import ExportRequest
from meshwright.export.target import Target, load
from meshwright.plan import Plan, check
from meshwright.plan.pool import several
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

__all__ = ["ENGINES", "TARGETS", "Exported", "Gap", "ExportRequest", "Target", "export", "refusals", "target"]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration: ``files`` by name, the main one first, the launch script (:data:`launch.FILE`) last where it is
    a file of its own; ``notes`` say how to start it, what is still to be filled in (``<...>`` in the files) and what is
    left at the target's own default."""

    target: str
    version: str
    files: dict[str, str]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The main file."""
        return next(iter(self.files.values()))

    @property
    def companions(self) -> tuple[str, ...]:
        """Names of the files that the main one cannot do without; the launch script is none."""
        return tuple(name for name in list(self.files)[1:] if name != launch.FILE)

    def renamed(self, name: str) -> Exported:
        """The same with another name of the main file, in its notes and its launch script as well.

        Raises:
            MeshwrightError: E003 for a name that a comment cannot hold, or under which Python cannot import what is
                imported.
        """
        (old, text), *others = self.files.items()
        if not name.isprintable():
            raise MeshwrightError.one("E003", f"{name!r} has characters that no line can hold", place="--out")
        if old.endswith(".py") and not (name.endswith(".py") and name[:-3].isidentifier()):
            message = f"{name} cannot be imported, and {self.target} imports its configuration"
            raise MeshwrightError.one(
                "E003", message, place=f"--out {name}", help=f"name a Python module, such as {old}"
            )
        modules = [f"--module {file.removesuffix('.py')} " for file in (old, name)]
        notes = tuple(note.replace(old, name).replace(*modules) for note in self.notes)
        files = {name: text, **dict(others)}
        if launch.FILE in files:
            files[launch.FILE] = files[launch.FILE].replace(*map(launch.named, (old, name)))
        else:
            files[name] = text.replace(f" {old}", f" {shlex.quote(name)}")
        return msgspec.structs.replace(self, files=files, notes=notes)


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
    gaps = list(exporter.limits(request))
    if gaps:
        instead = nearest(request, exporter.limits, _costs(name) if framework == "" else framework)
        raise refuse(gaps, request, instead.text(about.label) if instead else "", about.label)
    files, notes = exporter.write(request)
    return Exported(target=name, version=about.version, files=files, notes=tuple(notes))


def _costs(name: str) -> str:
    """The profile that a search for the target's plans prices them with, "" for the standard one."""
    from meshwright.export.runnable import profile

    return profile((name,))
