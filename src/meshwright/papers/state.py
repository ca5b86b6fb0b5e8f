"""State: what a user gets of a row, as its figures and its check find it.

*usable*: a word switches the technique on for a case of the user's own, its mechanism runs in the simulator or the
real executor, and every figure that heads the paper's claim is within its tolerance. *model only*: reproduced inside
its check, and no word switches it on. *partly*: something holds, and what is off or missing is said. *not yet*:
nothing is computed, or nothing that holds could have failed: being on the same side of 1, restating the paper's own
table or a definition supports no state."""

from __future__ import annotations

import msgspec

from meshwright.papers.outcome import Figure, Outcome
from meshwright.papers.record import Paper

USABLE, MODEL, PARTLY, NOT_YET = "usable", "model only", "partly", "not yet"
STATES = (USABLE, MODEL, PARTLY, NOT_YET)
#: Those whose figures are met.
REPRODUCED = (USABLE, MODEL)
#: Whether real processes carried out a row's recipe; "" where there is nothing for them.
EXECUTED, NOT_HERE = "executed", "not executed here"
NO_FIGURE = "no figure that heads its claim is given to hold it to"


class PaperState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one row: ``why`` says what is missing, ``judged`` how many figures and facts hold, ``executed``
    whether real processes took part, ``unchecked`` why something could not be checked on this machine; ``figures``
    are those that the paper gives, beside ours, but for what was measured now. A ``passing`` state may be that of the
    moment: it is not kept."""

    state: str
    why: str = ""
    judged: int = 0
    executed: str = ""
    unchecked: str = ""
    figures: tuple[Figure, ...] = ()
    passing: bool = False


def of(paper: Paper, outcome: Outcome | None) -> PaperState:
    """The state that an outcome gives a row; None is a row of which nothing is computed."""
    if outcome is None:
        return PaperState(state=NOT_YET, why=paper.missing or "no check yet")
    failures = outcome.failures
    unverified = () if paper.verified else ("title, authors and year are not confirmed",)
    lacking = (*failures, *outcome.missing, *unverified)
    unchecked = "; ".join(outcome.unchecked)
    reached, why = PARTLY, "; ".join(lacking)
    if not outcome.supported:
        reached = NOT_YET
        why = why or (f"not checked here: {unchecked}" if unchecked else "nothing that is judged could have failed")
    elif not lacking and paper.switch is None:
        reached = MODEL
    elif not lacking and any(figure.headline and figure.supports for figure in outcome.figures):
        reached = USABLE
    elif not lacking:
        why = NO_FIGURE
    return PaperState(
        state=reached,
        why=why,
        judged=outcome.judged - len(failures),
        executed=EXECUTED if outcome.executed else NOT_HERE if unchecked else "",
        unchecked=unchecked,
        figures=tuple(f for f in outcome.figures if f.paper is not None and not f.here),
        passing=outcome.passing or any(f.here and not f.ok for f in outcome.figures),
    )


__all__ = ["EXECUTED", "MODEL", "NOT_HERE", "NOT_YET", "PARTLY", "REPRODUCED", "STATES", "USABLE", "PaperState", "of"]
