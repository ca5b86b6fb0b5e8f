"""The part of ``meshwright search`` that compares sync policies by their time to a loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, note, print_json
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.cli.scaling import AskedCurve

#: What it is called as an objective.
OBJECTIVE = "time-to-loss"
#: Options of a search that are not of this one.
OTHERS = ("pareto", "variants", "top", "pick", "report", "plot", "store", "robust")


def search_to_loss(given: Any, ask: AskedCurve, said: Any) -> int:
    """0 when a plan was found, 1 when none fits, 130 when it was stopped before either was known."""
    from meshwright.cost import standard_on
    from meshwright.search.engines import extended
    from meshwright.search.restrict import restricted
    from meshwright.search.space import default
    from meshwright.search.to_loss import find_to_loss, usual_policies
    from meshwright.sync.studies import read_study
    from meshwright.sync.tokens import model

    _alone(given, ask)
    known = read_study(Path(given.study)) if given.study else model()
    cluster = ask.curves[0].clusters[0][1]
    asked = (ask.model, cluster, ask.train)
    demands, remarks = said.of(*asked)
    costs = standard_on(cluster, said.profile, asked[2].dtype)
    usual = extended(default(*asked, costs.framework.defaults.gather), demands.engines)
    space = restricted(usual, fix=given.fix, bound=given.bound, exclude=given.exclude, allow=given.allow)
    if not given.strategy:
        remarks = (
            *remarks,
            "the plan of sync=step is proven; those of the others are the best of a beam: --strategy exhaustive proves "
            "them, and is slow",
        )
    named = space["sync"] != usual["sync"]
    answer = find_to_loss(
        *asked,
        space,
        space["sync"] if named else usual_policies(known),
        known=known,
        said=_progress,
        costs=costs,
        strategy=given.strategy or "beam",
        demands=demands,
    )
    if given.json:
        print_json(answer.to_json())
    else:
        from meshwright.report.to_loss_text import render

        render(answer, console(), remarks)
    if given.save and answer.best is not None:
        from meshwright.plan.toml import save

        save(answer.best.plan, given.save, ask.saved(ask.curves[0].text, given.save))
        note(f"wrote {given.save}: meshwright predict {given.save} says more")
    if answer.best is not None:
        from meshwright.cli.next_steps import after_search, training_engines

        engines = training_engines(*asked, answer.best.plan)
        note(after_search(given.save, engines, given.for_.partition(",")[0].strip()))
    if answer.best is not None:
        return 0 if answer.found.best[0].prediction.fits else 1
    return INTERRUPTED if answer.stopped else 1


def _progress(policy: str) -> None:
    """The policy that is searched, on stderr."""
    if sys.stderr.isatty():
        print(f"\r\033[Ksearching plans of sync={policy}", end="", file=sys.stderr, flush=True)
    else:
        note(f"searching plans of sync={policy}")


def _alone(given: Any, ask: AskedCurve) -> None:
    """R003 for everything that this objective does not go with.

    Raises:
        MeshwrightError: all of it.
    """
    place = f"--objective {OBJECTIVE}"
    wrong = [
        Diagnostic(code="R003", message=f"--{name} is not of times to a loss", place=place, help=f"drop --{name}")
        for name in OTHERS
        if getattr(given, name) and not (name == "store" and given.store.lower() == "none")
    ]
    if ask.is_scaling:
        help = "name one cluster"
        wrong.append(Diagnostic(code="R003", message="times to a loss are of one cluster", place=place, help=help))
    if wrong:
        raise MeshwrightError(wrong)
