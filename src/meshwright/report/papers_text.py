"""Published systems as text: the table of all, one reproduced, and a what-if."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from meshwright.papers.outcome import BROKEN, NEAR, NO_PROCESSES, Figure, Outcome
from meshwright.papers.record import Paper
from meshwright.papers.shipped import shipped
from meshwright.papers.state import EXECUTED, MODEL, NOT_HERE, NOT_YET, PARTLY, STATES, USABLE, PaperState
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import WIDE, Page

if TYPE_CHECKING:
    from meshwright.papers.whatif import WhatIf

#: What a state gives a user.
TITLES = {
    USABLE: "Usable: a word switches it on in a case of yours, and its headline figures are met",
    MODEL: "Model only: reproduced inside its check, meshwright reproduce ID; no word switches it on",
    PARTLY: "Partly: something is off or missing",
    NOT_YET: "Not yet",
}
FAR = f"More than {NEAR:.0%} off, and why"
STYLE = {USABLE: "green", MODEL: "cyan", PARTLY: "yellow", NOT_YET: "dim"}


def counts(rows: list[tuple[Paper, PaperState]]) -> str:
    """Count the rows in each state, the most useful to a user first, and those executed by real processes."""
    held = [f"{sum(s.state == state for _, s in rows)} {state}" for state in STATES]
    real = [f"{n} {word}" for word in (EXECUTED, NOT_HERE) if (n := sum(s.executed == word for _, s in rows))]
    return f"{len(rows)} paper{'s' * (len(rows) != 1)}: {', '.join(held)}" + (f"; {', '.join(real)}" if real else "")


def table(rows: list[tuple[Paper, PaperState]], console: Console, *, said: str, folded: bool) -> None:
    """Print a line for every row, those of use first, with the command that switches them on. Those not yet reproduced
    are last, and only counted where `folded`; `said`: what the states are from."""
    with Page(console) as page:
        page.print(Text(counts(rows), "bold"))
        if said:
            page.quiet(said)
        shown = [row for row in rows if not (folded and row[1].state == NOT_YET)]
        wide = max((len(p.area) for p, _ in shown), default=0), max((len(s.executed) for _, s in shown), default=0)
        for title, mine in _sections(shown):
            page.title(title)
            for paper, state in mine:
                _line(paper, state, page, *wide)
        if len(shown) < len(rows):
            page.print()
            page.quiet(f"Not yet: {len(rows) - len(shown)} papers; meshwright papers --all lists them")
        if left := [state for _, state in rows if state.executed == NOT_HERE]:
            why = BROKEN if any(BROKEN in state.unchecked for state in left) else NO_PROCESSES
            page.quiet(f"not executed here: {why}; what was checked there is simulated")


def row(paper: Paper, state: PaperState, console: Console, *, said: str) -> None:
    """Print one row as its state has it: mechanism, claim, the paper's figures beside ours, what is missing. Nothing is
    computed."""
    with Page(console) as page:
        _head(paper, state, page)
        _figures(state.figures, page)
        if state.why:
            page.title("Off or missing")
            page.rows([(Text(one),) for one in state.why.split("; ")])
        page.print()
        if said:
            page.quiet(said)
        if state.judged:
            page.quiet(f"meshwright reproduce {paper.id}: the same computed now, with what is assumed")


def _sections(rows: list[tuple[Paper, PaperState]]) -> list[tuple[str, list[tuple[Paper, PaperState]]]]:
    """Rows by state, under titles that say what a user gets."""
    found = [(TITLES[state], [row for row in rows if row[1].state == state]) for state in STATES]
    return [(title, mine) for title, mine in found if mine]


def _line(paper: Paper, state: PaperState, page: Page, area: int, executed: int) -> None:
    """One row: id, state, area, whether exact, whether executed, source; where there is room what is missing."""
    line = Text(f"  {paper.id:<22} ") + Text(f"{state.state:<10}", STYLE[state.state])
    kind = "exact" if paper.exact else "approximate"
    line += Text(f" {paper.area:<{area}}  {kind:<12} {state.executed:<{executed}} {paper.cited}", "dim")
    page.console.print(line, soft_wrap=True)
    if state.state == USABLE:
        page.console.print(Text(f"{'':<25}{switched_on(paper)}"), soft_wrap=True)
    if state.why and page.width >= WIDE:
        page.print(Text(state.why, "dim"), indent=25)


def compared(found: Mapping[str, PaperState], differs: Sequence[tuple[str, str]], console: Console) -> None:
    """Print in what states that were found just now differ from the shipped ones, a row each."""
    with Page(console) as page:
        open_ = sum(bool(state.unchecked) for state in found.values())
        here = f"; {open_} could not be checked in full here" if open_ else ""
        if not differs:
            page.print()
            page.print(Text(f"as shipped: {len(found)} of {len(found)} states{here}", "bold green"))
            return
        page.title(f"Other than shipped: {len(differs)} of {len(found)} states{here}")
        for name, what in differs:
            page.print(Text(f"{name}: {what}"), indent=2)


def shown(figure: Figure) -> tuple[str, str, str, str, str]:
    """A figure as cells: what, paper's, ours, error, judgement."""
    unit = f" {figure.unit}" if figure.unit else ""
    paper = "-" if figure.paper is None else f"{figure.paper:.4g}{unit}"
    error = "" if figure.error is None else f"{figure.error:+.1%}"
    return figure.what, paper, f"{figure.ours:.4g}{unit}", error, figure.asked


def reproduced(paper: Paper, outcome: Outcome | None, state: PaperState, console: Console) -> None:
    """Print one row in full: what it does and claims, the paper's figures beside ours, assumptions."""
    with Page(console) as page:
        _head(paper, state, page)
        if outcome is None:
            page.quiet(f"missing: {state.why}")
            return
        _figures(outcome.figures, page)
        if outcome.facts:
            page.title("What must hold")
            page.rows(
                [(Text("ok" if f.holds else "no", "green" if f.holds else "red"), Text(f.text)) for f in outcome.facts]
            )
        if outcome.baseline:
            page.title("Against")
            page.print(Text(outcome.baseline), indent=2)
        if outcome.assumptions:
            page.title("Assumed")
            page.rows([(Text(a),) for a in outcome.assumptions])
        for title, texts in (("Missing", outcome.missing), ("Not checked here", outcome.unchecked)):
            if texts:
                page.title(title)
                page.rows([(Text(t),) for t in texts])


def _head(paper: Paper, state: PaperState, page: Page) -> None:
    page.print(Text(f"{paper.id}: {state.state}", f"bold {STYLE[state.state]}"))
    page.print(Text(paper.title))
    page.quiet(f"{paper.cited}; source: {paper.source}" if paper.verified else "source: unverified")
    page.print(Text(paper.mechanism), indent=2)
    for name, text in claims(paper):
        page.quiet(f"{name}: {text}")


def _figures(figures: Sequence[Figure], page: Page) -> None:
    if figures:
        page.title("The paper's figures and ours")
        heads = ("figure", "paper", "ours", "error", "asked", "")
        cells = [(*shown(f), "ok" if f.ok else "no") for f in figures]
        page.rows([tuple(Text(h, "dim") for h in heads), *(_cells(c) for c in cells)])
    if missed := misses(figures):
        page.title(FAR)
        page.rows([(Text(f.what), Text(f.why)) for f in missed])


def misses(figures: Iterable[Figure]) -> list[Figure]:
    """Return the figures that do not hold or are far from the paper's, where it is known why."""
    return [f for f in figures if f.missed and f.why]


def _cells(cells: tuple[str, ...]) -> tuple[Text, ...]:
    *values, ok = cells
    return (*(Text(v) for v in values), Text(ok, "green" if ok == "ok" else "red"))


def switched_on(paper: Paper) -> str:
    """The command that has the technique in it; "" where no word switches it on."""
    return f"meshwright {paper.switch.command}" if paper.switch else ""


def claims(paper: Paper) -> list[tuple[str, str]]:
    """Return the authors' claim as (name, text): figure, hardware, baseline, version, and how it is switched on."""
    claim, switch = paper.claim, switched_on(paper)
    said = (
        ("claim", claim.text),
        ("on", claim.hardware),
        ("against", claim.baseline),
        ("version", claim.version),
        ("switched on by", switch),
    )
    return [(name, text) for name, text in said if text]


def tried(found: WhatIf, console: Console) -> None:
    """Print what recipes change in a plan's step."""
    with Page(console) as page:
        names = ", ".join(one.id for one in found.papers)
        if not found.changed:
            page.print(Text(f"{names}: the plan does this already", "bold"))
        else:
            better = found.gain > 1
            page.print(Text(f"{names}: {found.gain:.3f}x the throughput", "bold green" if better else "bold yellow"))
        page.rows(
            [(Text(name, "dim"), Text(before), Text("->", "dim"), Text(after)) for name, before, after in lines(found)]
        )
        for one in found.papers:
            kind = (
                "exact: training computes the same"
                if one.recipe_exact
                else "approximate: training computes something else"
            )
            page.quiet(f"{one.id} ({shipped().states[one.id].state}): {kind}. {one.mechanism}")


def lines(found: WhatIf) -> list[tuple[str, str, str]]:
    """(what, before, after) of a what-if."""
    a, b = found.before, found.after
    fits = {True: "yes", False: "no"}
    return [
        ("plan", a.plan.text(), b.plan.text()),
        ("step", seconds(a.step_time_s), seconds(b.step_time_s)),
        ("MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}"),
        ("bubble", f"{a.bubble:.1%}", f"{b.bubble:.1%}"),
        ("peak memory", gibibytes(a.peak_memory_bytes), gibibytes(b.peak_memory_bytes)),
        ("fits", fits[a.fits], fits[b.fits]),
        ("exact", "", "yes" if found.exact else "no, approximate"),
    ]
