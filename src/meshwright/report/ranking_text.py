"""Every recipe of the papers over one plan, as text: what each would bring, the best first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.papers.whatif import Attempt, Ranking
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page

HEADS = ("technique", "throughput", "step", "peak memory", "fits", "training", "changes in the plan")
#: A throughput over the plan's own from which a technique is said to gain: less reads as 1.000x.
GAINS = 1.0005
#: Columns of a terminal from which what a technique changes stands in its row, and not below it.
WIDE = 100


def render(ranking: Ranking, console: Console) -> None:
    """Print the ranking to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(ranking), "bold"))
        rows = [cells(ranking, a) for a in changed(ranking)]
        styles = ["" if a.after.fits else "dim" for a in changed(ranking)]
        if page.width >= WIDE:
            page.rows(_styled([HEADS, *rows], ["dim", *styles]))
        else:
            _in_two_lines(page, rows, styles)
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
        f"most is gained by {best.paper.id}"
        if gain >= GAINS
        else f"no technique is faster, the nearest is {best.paper.id}"
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


def _styled(rows: list[tuple[str, ...]], styles: list[str]) -> list[tuple[Text, ...]]:
    return [tuple(Text(cell, style) for cell in row) for row, style in zip(rows, styles)]


def _in_two_lines(page: Page, rows: list[tuple[str, ...]], styles: list[str]) -> None:
    """Numbers on one line and the words of the plan under them, so that a word stays whole on narrow terminals."""
    lines = [HEADS[:-1], *(row[:-1] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line, said, style in zip(lines, ["", *(row[-1] for row in rows)], ["dim", *styles]):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        page.print(Text(shown, style), indent=2, one_line=True)
        if said:
            page.print(Text(said, style), indent=5)
