"""What if: a user's plan with the recipes of papers put over it, against the plan as it was."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cost import Costs
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.papers.recipes import RECIPES
from meshwright.papers.record import Paper, paper, papers
from meshwright.plan import Plan, check
from meshwright.plan.text import over
from meshwright.predict import predict
from meshwright.prediction import Prediction
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

FORMAT_VERSION = 1
#: What an axis that a recipe needs is called.
AXES = {"pp": "a pipeline", "dp": "replicas", "tp": "tensor parallelism", "cp": "context parallelism"}


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The papers whose recipes were tried, and the step before and after."""

    papers: tuple[Paper, ...]
    before: Prediction
    after: Prediction

    @property
    def exact(self) -> bool:
        """Whether training computes what it did before."""
        return all(one.recipe_exact for one in self.papers)

    @property
    def gain(self) -> float:
        """Throughput after over before."""
        return self.before.step_time_s / self.after.step_time_s

    @property
    def memory_bytes(self) -> float:
        """What the fullest device holds more (or less, negative)."""
        return self.after.peak_memory_bytes - self.before.peak_memory_bytes

    @property
    def changed(self) -> bool:
        return self.before.plan != self.after.plan

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "papers": [one.id for one in self.papers],
            "exact": self.exact,
            "gain": self.gain,
            "memory_bytes": self.memory_bytes,
            "changed": self.changed,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def what_if(
    names: tuple[str, ...], model: Model, cluster: Cluster, train: Train, plan: Plan, *, costs: Costs | None = None
) -> WhatIf:
    """The step of `plan` with the recipes of the papers called `names` put over it, one after the other.

    Raises:
        MeshwrightError: J001 an unknown paper, J003 one without a recipe, J004 a recipe with nothing to work on, J005
            recipes that contradict each other, and every violation (P and S codes) of the plan before or after; all of
            a kind at once.
    """
    tried = _found(names)
    plan = plan.on(cluster.num_devices)
    violations = check(plan, model, cluster, train)
    if violations:
        raise MeshwrightError(violations)
    _applicable(tried, plan)
    changes: dict[str, dict[str, Any]] = {}
    after = plan
    for one in tried:
        alone = applied(one, plan, model, cluster, train)
        changes[one.id] = _changes(plan, alone)
        after = applied(one, after, model, cluster, train)
    _agree(changes)
    place = f"--try {','.join(names)}, which makes it {after.text()!r}"
    violations = [
        msgspec.structs.replace(d, place=f"{d.place}   <- {place}") for d in check(after, model, cluster, train)
    ]
    if violations:
        raise MeshwrightError(violations)
    before, found = (predict(model, cluster, train, p, costs=costs, detail=False) for p in (plan, after))
    return WhatIf(papers=tried, before=before, after=found)


def applied(one: Paper, plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """`plan` with the recipe of `one` put over it; whether that is legal is not asked."""
    assert one.recipe is not None
    if one.recipe.python:
        return RECIPES[one.recipe.python](plan, model, cluster, train)
    return over(plan, one.recipe.plan, place=f"recipe of {one.id}")


def _found(names: tuple[str, ...]) -> tuple[Paper, ...]:
    """The papers, everything wrong with the names at once."""
    found, wrong = [], []
    for name in names:
        try:
            one = paper(name)
        except MeshwrightError as error:
            wrong += error.diagnostics
            continue
        if one.recipe is None:
            with_one = [other.id for other in papers().values() if other.recipe is not None]
            help = f"papers with one: {', '.join(with_one)}"
            wrong.append(Diagnostic(code="J003", message=f"{one.id} has no recipe for a plan", place=name, help=help))
        found.append(one)
    if wrong:
        raise MeshwrightError(wrong)
    return tuple(found)


def _applicable(tried: tuple[Paper, ...], plan: Plan) -> None:
    wrong = [
        Diagnostic(
            code="J004",
            message=f"{one.id} works on {AXES[axis]}, and the plan has {axis}={getattr(plan.layout, axis)}",
            place=f"--try {one.id}",
            help=f"give the plan {axis} of 2 or more",
        )
        for one in tried
        for axis in (one.recipe.needs if one.recipe else ())
        if getattr(plan.layout, axis) <= 1
    ]
    if wrong:
        raise MeshwrightError(wrong)


def _changes(before: Plan, after: Plan) -> dict[str, Any]:
    """facet.field -> new value, of what differs."""
    return {
        f"{facet}.{field}": value
        for facet, record in msgspec.structs.asdict(after).items()
        for field, value in msgspec.structs.asdict(record).items()
        if getattr(getattr(before, facet), field) != value
    }


def _agree(changes: dict[str, dict[str, Any]]) -> None:
    """J005 for every field that two recipes set differently."""
    said: dict[str, tuple[str, Any]] = {}
    wrong = []
    for name, changed in changes.items():
        for field, value in changed.items():
            other, before = said.setdefault(field, (name, value))
            if before != value:
                wrong.append(
                    Diagnostic(
                        code="J005",
                        message=f"{other} sets {field} to {before!r} and {name} to {value!r}",
                        place=f"--try {','.join(changes)}",
                        help="try one of them, then the other",
                    )
                )
    if wrong:
        raise MeshwrightError(wrong)
