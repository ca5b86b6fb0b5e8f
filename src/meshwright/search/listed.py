"""Searches that predict every legal plan of a small space: of recommendation models and of models of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from meshwright.answer.prediction import FORMAT_VERSION
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan


class FoundPlans(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a search: predictions of the ``best`` plans, those that fit first, by time; how many were
    ``evaluated``."""

    best: tuple[Any, ...]
    evaluated: int

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return bool(self.best) and self.best[0].fits

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        return {
            "format_version": FORMAT_VERSION,
            "fits": self.fits,
            "evaluated": self.evaluated,
            "best": [one.to_json() for one in self.best],
        }


def best_of(
    plans: Iterable[Plan],
    *,
    check: Callable[[Plan], list[Diagnostic]],
    predict: Callable[[Plan], Any],
    seconds: Callable[[Any], float],
    top: int,
    alike: bool = False,
) -> FoundPlans:
    """Predict every plan that `check` finds nothing wrong with, and return the `top` best: those that fit by the
    `seconds` of their answers, others by memory. Of plans that come out the same, in time and memory, the first stands
    for all where plans may be `alike`, as they may differ in a word that changes nothing.

    Raises:
        MeshwrightError: where no plan is legal, what is wrong with the plainest.
    """
    wrong = [(plan, check(plan)) for plan in plans]
    legal = [plan for plan, faults in wrong if not faults]
    if not legal:
        raise MeshwrightError(min((faults for _, faults in wrong), key=len))
    answers = [predict(plan) for plan in legal]
    answers.sort(key=lambda one: (not one.fits, seconds(one) if one.fits else one.peak_memory_bytes))
    count = len(answers)
    if alike:
        first: dict[tuple[float, float], Any] = {}
        for one in answers:
            first.setdefault((seconds(one), one.peak_memory_bytes), one)
        answers = list(first.values())
    return FoundPlans(best=tuple(answers[:top]), evaluated=count)
