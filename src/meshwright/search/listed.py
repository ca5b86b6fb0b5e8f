"""Searches that predict every legal plan of a small space: of recommendation models, models of graphs, and diffusion
models that make images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import msgspec

from meshwright.answer.prediction import FORMAT_VERSION
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets import fields
from meshwright.search.interrupt import stopping
from meshwright.search.restrict import restricted
from meshwright.search.space import Space
from meshwright.search.walk import StopFlag

#: Told what is done, how much of it, and of how much.
Report = Callable[[str, int, int], None]


def quiet(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class FoundPlans(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a search: predictions of the ``best`` plans, those that fit first, by time; how many were
    ``evaluated`` of those that are ``legal``, fewer where somebody stopped it."""

    best: tuple[Any, ...]
    evaluated: int
    legal: int

    @property
    def stopped(self) -> bool:
        """Whether some plans were not looked at."""
        return self.evaluated < self.legal

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
            "stopped": self.stopped,
            "best": [one.to_json() for one in self.best],
        }


def values_of(
    domains: Mapping[str, tuple[Any, ...]],
    *,
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of facets, as facet -> value, under the restrictions that are said.

    Raises:
        MeshwrightError: R001 to R005 for restrictions.
    """
    forms = {name: fields()[name].form for name in domains}
    space = restricted(Space(domains={**domains}), fix=fix, bound=bound, exclude=exclude, allow=allow, forms=forms)
    for values in product(*(space[name] or () for name in domains)):
        yield dict(zip(domains, values))


def plan_of(values: Mapping[str, Any], devices: int) -> Plan | None:
    """Return the plan of so many `devices` that values of facets make, the rest data parallelism; None where their
    sizes do not divide the devices."""
    plan = Plan()
    for name, value in values.items():
        field = fields()[name]
        record = msgspec.structs.replace(getattr(plan, field.facet), **field.sets(value))
        plan = msgspec.structs.replace(plan, **{field.facet: record})
    layout = plan.layout
    return plan.on(devices) if devices % (layout.tp * layout.cp * layout.pp) == 0 else None


def best_of(
    plans: Iterable[Plan],
    *,
    check: Callable[[Plan], list[Diagnostic]],
    predict: Callable[[Plan], Any],
    seconds: Callable[[Any], float],
    top: int,
    alike: bool = False,
    report: Report = quiet,
) -> FoundPlans:
    """Predict every plan that `check` finds nothing wrong with, and return the `top` best: those that fit by the
    `seconds` of their answers, others by memory. Of plans that come out the same, in time and memory, the first stands
    for all where plans may be `alike`, as they may differ in a word that changes nothing. Ctrl-C ends it with the best
    of those that were predicted; `report` is told how many are.

    Raises:
        MeshwrightError: R005 where there is no plan; where none is legal, what is wrong with the plainest.
    """
    wrong = [(plan, check(plan)) for plan in plans]
    if not wrong:
        help = "tp, cp and pp multiply to a divisor of the number of devices: take back a --fix or a --bound"
        raise MeshwrightError.one("R005", "no plan of this space has a rank on every device", help=help)
    legal = [plan for plan, faults in wrong if not faults]
    if not legal:
        raise MeshwrightError(min((faults for _, faults in wrong), key=len))
    answers, stop = [], StopFlag()
    with stopping(stop):
        for plan in legal:
            answers.append(predict(plan))
            report("predicted", len(answers), len(legal))
            if stop.asked:
                break
    answers.sort(key=lambda one: (not one.fits, seconds(one) if one.fits else one.peak_memory_bytes))
    count = len(answers)
    if alike:
        first: dict[tuple[float, float], Any] = {}
        for one in answers:
            first.setdefault((seconds(one), one.peak_memory_bytes), one)
        answers = list(first.values())
    return FoundPlans(best=tuple(answers[:top]), evaluated=count, legal=len(legal))
