"""What-if: a user's plan with the recipes of papers put over it, against the plan as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import Costs
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.papers.recipes import RECIPES
from meshwright.papers.record import Paper, paper, papers
from meshwright.papers.shipped import shipped
from meshwright.plan import FACETS, Plan, check
from meshwright.plan.pool import models
from meshwright.plan.text import over
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

FORMAT_VERSION = 1
#: What an axis that a recipe needs is called.
AXES = {"pp": "a pipeline", "dp": "data-parallel replicas", "tp": "tensor parallelism", "cp": "context parallelism"}


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
        """Bytes by which the peak of the fullest device grows; negative where it shrinks."""
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


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One paper's recipe over a plan: the step ``after`` it, or ``why`` it cannot be put over this plan."""

    paper: Paper
    after: Prediction | None
    why: str = ""


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Every recipe over one plan: what fits first, and the most throughput first among those."""

    before: Prediction
    attempts: tuple[Attempt, ...]

    def gain(self, attempt: Attempt) -> float:
        """Throughput after over before; 0 where the recipe cannot be put over the plan."""
        return 0.0 if attempt.after is None else self.before.step_time_s / attempt.after.step_time_s

    def changes(self, attempt: Attempt) -> bool:
        """Whether the recipe makes another plan of this one."""
        return attempt.after is not None and attempt.after.plan != self.before.plan

    @property
    def fits(self) -> bool:
        """Whether a changed plan fits."""
        return any(self.changes(a) and a.after.fits for a in self.attempts)

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "before": self.before.to_json(),
            "attempts": [
                {
                    "paper": a.paper.id,
                    "state": shipped().states[a.paper.id].state,
                    "exact": a.paper.recipe_exact,
                    "why_not": a.why or None,
                    "changed": self.changes(a),
                    "gain": self.gain(a) or None,
                    "plan": a.after and a.after.plan.text(),
                    "fits": a.after and a.after.fits,
                    "step_time_s": a.after and a.after.step_time_s,
                    "step_time_interval_s": a.after and list(a.after.step_time_interval_s),
                    "peak_memory_bytes": a.after and a.after.peak_memory_bytes,
                }
                for a in self.attempts
            ],
        }


def rank(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    costs: Costs | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Ranking:
    """Every paper's recipe over `plan`, each alone, the best first. `report` is called with how many are tried of how
    many.

    Raises:
        MeshwrightError: every violation (P and S codes) of the plan itself.
    """
    before = predict(model, cluster, train, plan, costs=costs, detail=False)
    with_recipe = [one for one in papers().values() if one.recipe is not None]
    attempts = []
    for done, one in enumerate(with_recipe):
        if report is not None:
            report(done, len(with_recipe))
        try:
            found = what_if((one.id,), model, cluster, train, plan, costs=costs, before=before)
            attempts.append(Attempt(paper=one, after=found.after))
        except MeshwrightError as error:
            attempts.append(Attempt(paper=one, after=None, why=error.diagnostics[0].message))
    if report is not None:
        report(len(with_recipe), len(with_recipe))
    ranking = Ranking(before=before, attempts=tuple(attempts))

    def place(attempt: Attempt) -> tuple[bool, bool, float]:
        return attempt.after is None, attempt.after is not None and not attempt.after.fits, -ranking.gain(attempt)

    return msgspec.structs.replace(ranking, attempts=tuple(sorted(attempts, key=place)))


def what_if(
    names: tuple[str, ...],
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    costs: Costs | None = None,
    before: Prediction | None = None,
) -> WhatIf:
    """The step of `plan` with the recipes of the papers called `names` put over it, one after the other; `before` is
    the step of the plan itself where it is known.

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
    before = before or predict(model, cluster, train, plan, costs=costs, detail=False)
    found = before if after == plan else predict(model, cluster, train, after, costs=costs, detail=False)
    return WhatIf(papers=tried, before=before, after=found)


def applied(one: Paper, plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """`plan` with the recipe of `one` put over it; whether that is legal is not asked."""
    assert one.recipe is not None
    if plan.several:
        return _applied_to_pools(one, plan, model, cluster, train)
    if one.recipe.python:
        return RECIPES[one.recipe.python](plan, model, cluster, train)
    return over(plan, one.recipe.plan, place=f"recipe of {one.id}")


def _applied_to_pools(one: Paper, plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Return the plan with the recipe put over every pool that has what it works on."""
    pools = []
    for pool, part in zip(plan.pools, models(plan.pools, model), strict=True):
        if all(getattr(pool.plan.layout, axis) > 1 for axis in one.recipe.needs):
            own = cut(cluster, *pool.devices)
            changed = applied(one, pool.plan, part, own, train).on(own.num_devices)
            pool = msgspec.structs.replace(pool, plan=changed)
        pools.append(pool)
    return msgspec.structs.replace(plan, several=tuple(pools))


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
            message=f"{one.id} needs {AXES[axis]}, and the plan has {axis}={_widest(plan, axis)}",
            place=f"--try {one.id}",
            help=f"give the plan {axis} of 2 or more",
        )
        for one in tried
        for axis in (one.recipe.needs if one.recipe else ())
        if _widest(plan, axis) <= 1
    ]
    if wrong:
        raise MeshwrightError(wrong)


def _widest(plan: Plan, axis: str) -> int:
    """Return the size of an axis in the pool where it is largest."""
    return max(getattr(pool.plan.layout, axis) for pool in plan.pools)


def _changes(before: Plan, after: Plan) -> dict[str, Any]:
    """facet.field -> new value, of what differs; with the pool's name before it where there are several."""
    if before.several:
        return {
            f"{pool.name}.{what}": value
            for pool, changed in zip(before.pools, after.pools, strict=True)
            for what, value in _changes(pool.plan, changed.plan).items()
        }
    return {
        f"{facet}.{field}": value
        for facet in FACETS
        for field, value in msgspec.structs.asdict(getattr(after, facet)).items()
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
