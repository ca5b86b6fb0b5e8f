"""Outcome: what a check found, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError

#: How a figure is judged: as near the paper's as ``bound`` (relative), on the same side of 1 as it, at most or at least
#: ``bound`` times it (``bound`` itself where the paper gives none), above or below 1 where it says so without a figure,
#: or only shown.
WITHIN, SIDE, AT_MOST, AT_LEAST, SHOWN = "within", "side", "at most", "at least", "shown"
ABOVE, BELOW = "above 1", "below 1"
JUDGES = (WITHIN, SIDE, AT_MOST, AT_LEAST, SHOWN, ABOVE, BELOW)
#: Judgements that a figure passes without being near anything: they may fail a row, and support no state of it.
LOOSE = (SHOWN, SIDE, ABOVE, BELOW)
#: A figure further from its paper's, relative, is a miss.
NEAR = 0.10


class Figure(msgspec.Struct, frozen=True):
    """One figure: what it is, the paper's value (None where it gives none), ours, the unit, and how it is judged;
    ``why`` says what a miss comes from. ``here``: measured now, so that it is another one every time. ``headline``:
    it is what the paper claims of itself; ``restated``: it follows from the paper's own numbers or its definition, so
    that agreeing with it proves nothing."""

    what: str
    paper: float | None
    ours: float
    unit: str = ""
    judge: str = SHOWN
    bound: float = 1.0
    why: str = ""
    here: bool = False
    headline: bool = False
    restated: bool = False

    def __post_init__(self) -> None:
        # numpy's numbers, of which some checks compute theirs, are no plain values
        msgspec.structs.force_setattr(self, "ours", float(self.ours))
        if self.paper is not None:
            msgspec.structs.force_setattr(self, "paper", float(self.paper))

    @property
    def error(self) -> float | None:
        """Ours over the paper's, minus one; None against a zero."""
        return self.ours / self.paper - 1 if self.paper else None

    @property
    def missed(self) -> bool:
        """Whether it does not hold, or is further from the paper's than :data:`NEAR`; a bound may be outdone."""
        outdone = self.judge in (AT_MOST, AT_LEAST)
        return not self.ok or (self.error is not None and not outdone and abs(self.error) > NEAR)

    @property
    def ok(self) -> bool:
        """Whether the judgement holds; what is only shown always does."""
        paper = 1.0 if self.paper is None else self.paper
        if self.judge == WITHIN:
            return abs(self.ours - paper) <= self.bound * abs(paper) + 1e-12
        if self.judge == SIDE:
            return (self.ours > 1) == (paper > 1) and (self.ours < 1) == (paper < 1)
        if self.judge == AT_MOST:
            return self.ours <= self.bound * paper + 1e-12
        if self.judge == AT_LEAST:
            return self.ours >= self.bound * paper - 1e-12
        if self.judge in (ABOVE, BELOW):
            return self.ours > 1 if self.judge == ABOVE else self.ours < 1
        return True

    @property
    def loose(self) -> bool:
        """Whether only the side of 1 that a ratio lies on is judged, however that is said."""
        least = (
            self.judge == AT_LEAST
            and self.unit == "x"
            and self.bound * (1.0 if self.paper is None else self.paper) == 1
        )
        return self.judge in LOOSE or least

    @property
    def supports(self) -> bool:
        """Whether it holds, and could have failed for a reason other than arithmetic."""
        return self.ok and not self.loose and not self.restated

    @property
    def asked(self) -> str:
        """The judgement in words."""
        if self.judge == WITHIN:
            return f"within {self.bound:.1%}" if self.bound >= 1e-3 else "equal"
        if self.judge == SIDE:
            return "same side of 1"
        if self.judge not in (AT_MOST, AT_LEAST):
            return self.judge
        return f"{self.judge} {self.bound:g}" if self.paper is None else f"{self.judge} {self.bound:g}x"


def equal(what: str, paper: float, ours: float, **more: Any) -> Figure:
    """A figure that has to be the paper's own."""
    return Figure(what, paper, ours, judge=WITHIN, bound=0.0, **more)


def at_most(what: str, ours: float, bound: float, **more: Any) -> Figure:
    """A figure with a bound of its own, of which the paper gives no value."""
    return Figure(what, None, ours, judge=AT_MOST, bound=bound, **more)


def above(what: str, ours: float, **more: Any) -> Figure:
    """A ratio that has to be above 1, of which the paper gives no value."""
    return Figure(what, None, ours, "x", ABOVE, **more)


def below(what: str, ours: float, **more: Any) -> Figure:
    """A ratio that has to be below 1, of which the paper gives no value."""
    return Figure(what, None, ours, "x", BELOW, **more)


class Fact(msgspec.Struct, frozen=True):
    """Something that must hold, in words; ``restated``: by definition, so that holding proves nothing."""

    text: str
    holds: bool
    restated: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "holds", bool(self.holds))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check. ``baseline`` is what the figures are against; ``missing`` what the technique still lacks
    here, even when every figure is met. ``executed``: real processes took part; ``unchecked`` says what could not be
    checked on this machine and why, which speaks neither for nor against the technique. ``passing``: some of it may be
    of this moment alone (a process died, the machine was busy), so that it is not kept."""

    figures: tuple[Figure, ...] = ()
    facts: tuple[Fact, ...] = ()
    baseline: str = ""
    assumptions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    executed: bool = False
    unchecked: tuple[str, ...] = ()
    passing: bool = False

    @property
    def failures(self) -> tuple[str, ...]:
        """Every judged figure and every fact that does not hold, in words."""
        figures = [
            f"{f.what}: {f.ours:.4g}{'' if f.paper is None else f' for {f.paper:.4g}'} {f.unit} ({f.asked})".replace(
                "  ", " "
            )
            for f in self.figures
            if not f.ok
        ]
        return (*figures, *(f"not so: {f.text}" for f in self.facts if not f.holds))

    @property
    def supported(self) -> bool:
        """Whether anything holds that could have failed."""
        return any(f.supports for f in self.figures) or any(f.holds and not f.restated for f in self.facts)

    @property
    def judged(self) -> int:
        return sum(f.judge != SHOWN for f in self.figures) + len(self.facts)


def joined(parts: Sequence[Outcome]) -> Outcome:
    """The outcomes of a row's parts as one."""
    lists = ("figures", "facts", "assumptions", "missing", "unchecked")
    return Outcome(
        **{name: tuple(item for part in parts for item in getattr(part, name)) for name in lists},
        baseline="; ".join(dict.fromkeys(part.baseline for part in parts if part.baseline)),
        executed=any(part.executed for part in parts),
        passing=any(part.passing for part in parts),
    )


class Check(msgspec.Struct, frozen=True):
    """A check by name: a function without arguments that carries out the recipe and compares."""

    find: Callable[[], Outcome]

    def __call__(self) -> Outcome:
        return self.find()


#: Why nothing is executed where :func:`can_run` says no, and where it says yes in vain.
NO_PROCESSES, BROKEN = "torch is not installed", "torch cannot be loaded"
#: What a job says one of whose processes ended before its time: it may have been killed.
DIED = "L001"


def can_run() -> bool:
    """Whether torch is there, without loading it."""
    return find_spec("torch") is not None


def not_here() -> str:
    """Why no real processes can be started; "" where they can. Loads torch."""
    if not can_run():
        return NO_PROCESSES
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        return f"{BROKEN}: {error}"
    return ""


def by_processes(found: Outcome, what: str, carry_out: Callable[[], Outcome]) -> Outcome:
    """`found` with what real processes make of it, as `carry_out` says; where there are none, or where they end before
    their time, that is said instead. `what` names it."""
    if why := not_here():
        # a torch that is broken may be mended, and nothing else tells that apart
        passing = found.passing or why != NO_PROCESSES
        return msgspec.structs.replace(found, unchecked=(*found.unchecked, f"{what}: {why}"), passing=passing)
    try:
        more = carry_out()
    except MeshwrightError as error:
        first = error.diagnostics[0]
        more = Outcome(facts=(Fact(f"{what}: {first.message}", False),), passing=first.code == DIED)
    return msgspec.structs.replace(
        found,
        figures=(*found.figures, *more.figures),
        facts=(*found.facts, *more.facts),
        unchecked=(*found.unchecked, *more.unchecked),
        executed=True,
        passing=found.passing or more.passing,
    )
