"""The head of an answer as text: whether it fits, what comes of it, cautions, and the question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import RankMemory
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page


def verdict(
    page: Page,
    took: Metric,
    of: str,
    rate: str,
    memory: Sequence[RankMemory],
    cautions: Iterable[str],
    question: Iterable[tuple[str, str]],
) -> None:
    """Print the memory of the fullest rank, how long ``of`` what takes with its interval, the ``rate`` that comes of
    it, cautions, and the question as (name, words)."""
    low, high = took.interval or (took.value,) * 2
    tightest, fits = max(memory, key=lambda rank: rank.peak_bytes), all(rank.headroom_bytes >= 0 for rank in memory)
    held = f"{gibibytes(tightest.peak_bytes)} of {gibibytes(tightest.capacity_bytes)}"
    said = f"{seconds(took.value)} [{seconds(low)}, {seconds(high)}] {of}"
    style = "bold green" if fits else "bold red"
    page.print(Text(f"{'fits' if fits else 'does not fit'}: {held} | {said} | {rate}", style))
    for caution in cautions:
        page.print(Text(f"! {caution}", "yellow"), indent=2)
    page.print()
    page.rows([(Text(name, "dim"), Text(value)) for name, value in question])
