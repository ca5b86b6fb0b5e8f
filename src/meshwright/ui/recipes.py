"""The effect of each paper's recipe on a plan: gain, memory, exact or not, or why it does not apply."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.errors import MeshwrightError
from meshwright.papers.record import Paper, papers
from meshwright.papers.shipped import shipped
from meshwright.papers.whatif import what_if
from meshwright.quantity import seconds
from meshwright.ui.asked import AskedTexts, read

#: Two recipes set the same field of a plan differently.
CONTRADICTION = "J005"


class RecipesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question whose plan every recipe is tried on."""

    asked: AskedTexts


def recipes(request: RecipesRequest) -> dict[str, Any]:
    """Every recipe with what it brings to the plan as it is with those in ``tries``; one that is among them is
    compared with the plan without it, one that contradicts them is tried ``instead`` of them.

    Raises:
        MeshwrightError: what is wrong with the question.
    """
    found = read(request.asked)
    if found.wrong:
        raise MeshwrightError([d for _, d in found.wrong])
    on, before = request.asked.tries, predict(*found.parts, costs=found.costs, detail=False)
    trying = Trying(parts=found.parts, costs=found.costs, before=before, others={})
    rows = [_row(one, on, trying) for one in papers().values() if one.recipe is not None]
    return {"recipes": sorted(rows, key=lambda row: (row["error"] != "", not row["changed"], -row["gain"]))}


class Trying(msgspec.Struct, frozen=True, kw_only=True):
    """The base that recipes are tried on: the question, its plan's step, and the steps with some recipes over it."""

    parts: tuple
    costs: Any
    before: Prediction
    others: dict[tuple[str, ...], Prediction]

    def step(self, names: tuple[str, ...]) -> Prediction:
        """The step with these recipes over the plan."""
        if not names:
            return self.before
        if names not in self.others:
            self.others[names] = what_if(names, *self.parts, costs=self.costs, before=self.before).after
        return self.others[names]


def _row(one: Paper, on: tuple[str, ...], trying: Trying) -> dict[str, Any]:
    row = {
        "id": one.id,
        "title": one.title,
        "mechanism": one.mechanism,
        "cited": one.cited,
        "state": shipped().states[one.id].state,
        "exact": one.recipe_exact,
        "on": one.id in on,
        "changed": False,
        "gain": 1.0,
        "instead": [],
        "error": "",
    }
    others = tuple(name for name in on if name != one.id)
    try:
        after, before = trying.step((*others, one.id)), trying.step(others)
    except MeshwrightError as error:
        if others and any(d.code == CONTRADICTION for d in error.diagnostics):
            return _row(one, (), trying) | {"instead": list(others)}
        return row | {"error": "; ".join(d.message for d in error.diagnostics)}
    return row | {
        "changed": after.plan != before.plan,
        "gain": before.step_time_s / after.step_time_s,
        "memory_bytes": after.peak_memory_bytes - before.peak_memory_bytes,
        "step": seconds(after.step_time_s),
        "fits": after.fits,
        "sets": _sets(before.plan.text(), after.plan.text()),
    }


def _sets(before: str, after: str) -> str:
    """The words of a plan that it has instead of those of another."""
    gone, new = before.split(), after.split()
    return " ".join(w for w in new if w not in gone) or f"without {' '.join(w for w in gone if w not in new)}"
