"""A search as the page runs it: progress while it goes, the ranked plans and the Pareto front when it ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from meshwright.cli.demands import Said
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.written import write
from meshwright.quantity import big, seconds
from meshwright.report.search_text import HEADS, cells, coverage, demanded, excluded, shown, verdict, words
from meshwright.search.engines import extended
from meshwright.search.find import find
from meshwright.search.found import OBJECTIVES, Found
from meshwright.search.progress import line
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.ui.asked import AskedTexts, Id, Text, read
from meshwright.ui.repair import changed

Send = Callable[[dict[str, Any]], None]


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question without a plan. ``fix`` are facets that may only have some values, as words ``tp=8 schedule=1f1b``;
    ``engines``, ``headroom`` and ``risk`` what plans have to be run by, leave free and risk; ``pareto`` two
    objectives."""

    asked: AskedTexts
    objective: Annotated[str, msgspec.Meta(max_length=20)] = "step"
    pareto: tuple[Annotated[str, msgspec.Meta(max_length=20)], Annotated[str, msgspec.Meta(max_length=20)]] = (
        "step",
        "headroom",
    )
    fix: Text = ""
    engines: Id = ""
    headroom: Id = ""
    risk: Id = ""
    top: Annotated[int, msgspec.Meta(ge=1, le=50)] = 8


def search(request: SearchRequest, send: Send, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Run a search and return its answer. `send` is given the progress a few times a second; once `stopped` says so,
    what was found until then is the answer.

    Raises:
        MeshwrightError: what is wrong with the question (its plan is not asked), the facets and objectives.
    """
    found = read(request.asked)
    said = Said(
        headroom=request.headroom, risk=request.risk, engines=request.engines, framework=request.asked.framework
    )
    wrong = [*(d for control, d in found.wrong if control != "plan"), *said.wrong()]
    if wrong:
        raise MeshwrightError(wrong)
    assert found.model and found.cluster and found.train
    question = (found.model, found.cluster, found.train)
    demands, remarks = said.of(*question)
    costs = standard_on(found.cluster, said.profile, found.train.dtype)
    usual = extended(default(*question, costs.framework.defaults.gather), demands.engines)
    space = restricted(usual, fix=tuple(request.fix.split()), bound=(), exclude=(), allow=())

    def report(walk: Any) -> None:
        done = min(walk.rejected.total() + len(walk.tried), walk.covered)
        share = done / walk.covered if walk.covered else 0.0
        send({"progress": line(walk), "share": share})
        if stopped():
            walk.stopped = True

    gc.disable()  # as the command does: millions of small objects that live on, and no cycles
    try:
        answer = find(
            *question,
            space=space,
            costs=costs,
            families=True,
            demands=demands,
            recommend=True,
            objective=request.objective,
            objectives=request.pareto,
            top=request.top,
            report=report,
        )
    finally:
        gc.enable()
    return _plain(msgspec.structs.replace(answer, remarks=(*answer.remarks, *remarks)))


def _plain(found: Found) -> dict[str, Any]:
    """A search as the page shows it: the recommended plan, the best families, the front, why others lost."""
    pick = found.recommended
    return {
        "verdict": verdict(found),
        "fits": found.fits,
        "coverage": coverage(found),
        "remarks": [*filter(None, (demanded(found), *found.remarks))],
        "recommended": pick
        and {
            "plan": _open(pick.plan),
            "text": pick.plan.text(),
            "why": f"{seconds(pick.prediction.step_time_s)} a step: {pick.why}",
        },
        "excluded": [
            {
                "title": title,
                "text": f"{one.plan.text()}: {seconds(one.step_time_s)} a step. {' '.join(one.reasons)}",
            }
            for title, one in excluded(found)
        ],
        "heads": list(HEADS),
        "rows": [
            {
                "cells": list(cells(r)),
                "plan": _open(r.plan),
                "text": words(r),
                "tie": r.tie is not None,
                "delta": r.delta,
                "variants": [
                    {"plan": _open(v.plan), "text": f"{v.plan.text()}: {seconds(v.step_time_s)}"} for v in r.variants
                ],
            }
            for r in found.best
        ],
        "misses": [
            {"plan": _open(m.plan), "step": seconds(m.step_time_s), "lacks": m.lacks_bytes, "remedy": m.remedy}
            for m in found.misses
        ],
        "objectives": [{"name": o, "title": OBJECTIVES[o]} for o in found.objectives],
        "points": [
            {
                "plan": _open(plan),
                "text": plan.text(),
                "values": list(values),
                "shown": [shown(o, v) for o, v in zip(found.objectives, values)],
            }
            for plan, values in found.pareto
        ],
        "rejected": [[why, big(n)] for why, n in sorted(found.pruned.items(), key=lambda item: -item[1])],
    }


def _open(plan: Plan) -> str:
    """The words of a plan that uses the whole cluster, without ``dp``, which follows."""
    return write(changed(plan, "layout", dp=0))
