"""Checks that train with real processes. Each is one function to fill in; until then it says what it waits for."""

from __future__ import annotations

from meshwright.papers.outcome import Check, Outcome


def _waits(what: str) -> Check:
    """A check that has no body yet: it holds nothing and says what is missing."""
    return Check(lambda: Outcome(missing=(what,)), needs="run")


CHECKS = {
    "ucp": _waits("a run saved under one layout and resumed under another, with equal losses"),
    "datastates-llm": _waits("a run whose checkpoints are copied during the next step, with equal losses"),
    "dpro": _waits("a profiled gloo job, its clocks aligned, replayed within 5%, and a what-if confirmed by a run"),
}
