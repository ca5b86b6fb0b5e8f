"""Every recipe of the papers over one plan, as text: what each would bring, the best first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.papers.whatif import Attempt, Ranking
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page

HEADS = ("technique", "throughput", "step", "peak memory", "fits", "training", "changes in the plan")


def render(ranking: Ranking, console: Console) -> None:
    """Print the ranking to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(ranking), "bold"))
        page.rows([tuple(Text(head, "dim") for head in HEADS), *(_row(cells(ranking, a), a) for a in changed(ranking))])
        same = [a.paper.id for a in ranking.attempts if a.after is not None and not ranking.changes(a)]
        if same:
            page.title("The plan does this already")
            page.print(Text(", ".join(same)), indent=2)
        refused = [a for a in ranking.attempts if a.after is None]
        if refused:
            page.title("Not on this plan")
            page.rows([(Text(a.paper.id), Text(a.why, "dim")) for a in refused])
        page.quiet("meshwright whatif --try ID shows one of them in full, meshwright reproduce ID its paper's figures")


def verdict(ranking: Ranking) -> str:
    """The technique that gains most among those that fit, and from where."""
    before = ranking.before
    start = f"{before.plan.text()}: {seconds(before.step_time_s)} a step"
    best = next((a for a in changed(ranking) if a.after.fits), None)
    if best is None:
        return f"{start}; none of {len(ranking.attempts)} techniques makes another plan of it that fits"
    gain = ranking.gain(best)
    what = (
        f"most is gained by {best.paper.id}" if gain > 1 else f"no technique is faster, the nearest is {best.paper.id}"
    )
    return f"{start}; {what}: {gain:.3f}x the throughput"


def changed(ranking: Ranking) -> list[Attempt]:
    """The attempts that make another plan, as they are ranked."""
    return [a for a in ranking.attempts if ranking.changes(a)]


def cells(ranking: Ranking, attempt: Attempt) -> tuple[str, ...]:
    """One row: technique, gain, step time, peak memory, fits, exact, what its plan says otherwise."""
    after = attempt.after
    words, before = after.plan.text().split(), ranking.before.plan.text().split()
    gone = " ".join(w for w in before if w not in words)
    new = " ".join(w for w in words if w not in before)
    return (
        attempt.paper.id,
        f"{ranking.gain(attempt):.3f}x",
        seconds(after.step_time_s),
        gibibytes(after.peak_memory_bytes),
        "yes" if after.fits else "no",
        "exact" if attempt.paper.recipe_exact else "approximate",
        f"{gone or '-'} -> {new or '-'}",
    )


def _row(cells: tuple[str, ...], attempt: Attempt) -> tuple[Text, ...]:
    return tuple(Text(cell, "" if attempt.after.fits else "dim") for cell in cells)
