"""State: what a check's outcome makes of a row.

A row *works* when its source is confirmed and everything its check judges holds; *partly* when the check runs and
something is missing or off, which is then said; *not yet* when there is no check, or nothing of it holds.
"""

from __future__ import annotations

import msgspec

from meshwright.papers.outcome import Figure, Outcome
from meshwright.papers.record import Paper

WORKS, PARTLY, NOT_YET = "works", "partly", "not yet"
STATES = (WORKS, PARTLY, NOT_YET)
#: Whether real processes carried out a row's recipe; "" where there is nothing for them.
EXECUTED, NOT_HERE = "executed", "not executed here"


class State(msgspec.Struct, frozen=True, kw_only=True):
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


def of(paper: Paper, outcome: Outcome | None) -> State:
    """The state that an outcome gives a row; None is a row without a check."""
    if outcome is None:
        return State(state=NOT_YET, why=paper.missing or "no check yet")
    failures = outcome.failures
    unverified = () if paper.verified else ("title, authors and year are not confirmed",)
    lacking = (*failures, *outcome.missing, *unverified)
    held = outcome.judged - len(failures)
    unchecked = "; ".join(outcome.unchecked)
    real = EXECUTED if outcome.executed else NOT_HERE if unchecked else ""
    reached, why = WORKS, ""
    if lacking or not held:
        reached = PARTLY if held else NOT_YET
        why = "; ".join(lacking) or (f"not checked here: {unchecked}" if unchecked else "the check judges nothing")
    return State(
        state=reached,
        why=why,
        judged=held,
        executed=real,
        unchecked=unchecked,
        figures=tuple(f for f in outcome.figures if f.paper is not None and not f.here),
        passing=outcome.passing or any(f.here and not f.ok for f in outcome.figures),
    )


__all__ = ["EXECUTED", "NOT_HERE", "NOT_YET", "PARTLY", "STATES", "WORKS", "State", "of"]
