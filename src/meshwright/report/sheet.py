"""An answer as a sheet: verdict, question, where the time goes, what else there is to say, memory, what it rests on.

Answers that are neither of a training step nor of a server (images, recommendation models, rollouts, graphs) are one
sheet each, which :mod:`.sheet_text` prints and :mod:`.sheet_html` writes as a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.quantity import gibibytes, seconds
from meshwright.timeline import Timeline


class Lines(NamedTuple):
    """Names with their values, and cells behind these; remarks stand below."""

    title: str
    rows: Sequence[tuple[str, ...]]
    remarks: Sequence[str] = ()


class Spent(NamedTuple):
    """Seconds by cause, (name, seconds, what that is), which add up to ``total_s`` with what is too short to show."""

    title: str
    total_s: float
    causes: Sequence[tuple[str, float, str]]


class SheetGrid(NamedTuple):
    """A table: its heads and its rows, of which the one at ``chosen`` is that of the answer; remarks stand below."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    remarks: Sequence[str] = ()
    chosen: int = -1


class Remarks(NamedTuple):
    """Sentences."""

    title: str
    lines: Sequence[str]


#: What a sheet is made of.
SheetSection = Lines | Spent | SheetGrid | Remarks


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: whether it ``fits``, its ``headline``, the ``question`` as (name, words), sections, ``memory`` of each
    rank class and what a terminal says of it (``held``), what is held ``elsewhere``, and assumptions. A ``timeline`` is
    of what ``timed`` says."""

    name: str
    fits: bool
    headline: str
    question: tuple[tuple[str, str], ...]
    sections: tuple[SheetSection, ...]
    memory: tuple[RankMemory, ...]
    held: tuple[SheetSection, ...]
    assumptions: tuple[Assumption, ...]
    elsewhere: tuple[SheetSection, ...] = ()
    cautions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timeline: Timeline | None = None
    timed: str = "one step"

    @property
    def tightest(self) -> RankMemory:
        """The rank class with the least memory to spare."""
        return min(self.memory, key=lambda rank: rank.headroom_bytes)


def headline(took: Metric, of: str, rate: str, memory: Sequence[RankMemory]) -> str:
    """Return the memory of the fullest rank, how long ``of`` what takes with its interval, and the ``rate`` that comes
    of it."""
    low, high = took.interval or (took.value,) * 2
    tightest, fits = max(memory, key=lambda rank: rank.peak_bytes), all(rank.headroom_bytes >= 0 for rank in memory)
    held = f"{gibibytes(tightest.peak_bytes)} of {gibibytes(tightest.capacity_bytes)}"
    said = f"{seconds(took.value)} [{seconds(low)}, {seconds(high)}] {of}"
    return f"{'fits' if fits else 'does not fit'}: {held} | {said} | {rate}"


def fullest(memory: Sequence[RankMemory], noun: str = "rank") -> Lines:
    """Return what the rank class with the most memory holds."""
    tightest = max(memory, key=lambda rank: rank.peak_bytes)
    title = f"Memory of the fullest {noun}: {tightest.rank} (x{tightest.multiplicity})"
    return Lines(title, sizes(tightest.alive))


def sizes(alive: dict[str, float]) -> list[tuple[str, str]]:
    """Return names with bytes as lines."""
    return [(name, gibibytes(size)) for name, size in alive.items()]


def shown(causes: Spent) -> list[tuple[str, float, float, str]]:
    """Return (name, begin, seconds, words) of the causes that can be seen, one behind the other."""
    at, out = 0.0, []
    for name, spent, words in causes.causes:
        if spent > 1e-6 * causes.total_s:
            out.append((name, at, spent, words))
            at += spent
    return out
