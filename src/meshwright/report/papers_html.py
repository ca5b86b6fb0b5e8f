"""Published systems as one offline HTML file: the table of all, one reproduced, or a what-if."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.atomic import write_bytes
from meshwright.papers.outcome import Outcome
from meshwright.papers.record import Paper
from meshwright.papers.state import STATES, PaperState
from meshwright.report import document, palette
from meshwright.report.papers_text import FAR, claims, counts, lines, misses, shown, switched_on
from meshwright.report.ranking_text import HEADS, cells, changed, verdict

if TYPE_CHECKING:
    from meshwright.papers.whatif import Ranking, WhatIf


def write_table(rows: list[tuple[Paper, PaperState]], path: str | Path, *, said: str) -> None:
    """Write every row with its state, what switches it on and what is missing, those of use first; `said`: what the
    states are from.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    cells = [
        (
            p.id,
            s.state,
            s.executed,
            "exact" if p.exact else "approximate",
            p.title,
            p.cited,
            p.mechanism,
            switched_on(p),
            s.why,
        )
        for p, s in sorted(rows, key=lambda row: STATES.index(row[1].state))
    ]
    heads = ("paper", "state", "executed", "kind", "title", "source", "what it does", "switched on by", "missing")
    _write(path, counts(rows), [said], [{"title": "", "heads": heads, "rows": cells}])


def write_reproduced(paper: Paper, outcome: Outcome | None, state: PaperState, path: str | Path) -> None:
    """One row in full.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    said = [paper.title, paper.cited, f"source: {paper.source}", paper.mechanism]
    said += [f"{name}: {text}" for name, text in claims(paper)]
    tables: list[dict[str, Any]] = []
    if outcome is not None:
        figures = [(*shown(f), "ok" if f.ok else "no") for f in outcome.figures]
        heads = ("figure", "paper", "ours", "error", "asked", "met")
        tables = [
            {"title": "The paper's figures and ours", "heads": heads, "rows": figures},
            {"title": FAR, "heads": ("", ""), "rows": [(f.what, f.why) for f in misses(outcome.figures)]},
            {
                "title": "What must hold",
                "heads": ("", ""),
                "rows": [("ok" if f.holds else "no", f.text) for f in outcome.facts],
            },
            {"title": "Against", "heads": ("",), "rows": [(outcome.baseline,)] if outcome.baseline else []},
            {"title": "Assumed", "heads": ("",), "rows": [(a,) for a in outcome.assumptions]},
            {"title": "Missing", "heads": ("",), "rows": [(m,) for m in outcome.missing]},
            {"title": "Not checked here", "heads": ("",), "rows": [(u,) for u in outcome.unchecked]},
        ]
    _write(path, f"{paper.id}: {state.state}", said, tables)


def write_what_if(found: WhatIf, path: str | Path) -> None:
    """Write a page with a user's plan before and after the recipes of papers: a table and each recipe's mechanism.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    names = ", ".join(one.id for one in found.papers)
    said = [f"{one.id}: {'exact' if one.recipe_exact else 'approximate'}. {one.mechanism}" for one in found.papers]
    table = {"title": "Before and after", "heads": ("", "before", "after"), "rows": lines(found)}
    _write(path, f"{names}: {found.gain:.3f}x the throughput", said, [table])


def write_ranking(ranking: Ranking, path: str | Path) -> None:
    """Every recipe over one plan.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    rows = [cells(ranking, attempt) for attempt in changed(ranking)]
    refused = [(a.paper.id, a.why) for a in ranking.attempts if a.after is None]
    tables = [
        {"title": "What each technique would bring", "heads": HEADS, "rows": rows},
        {"title": "Not on this plan", "heads": ("technique", "why"), "rows": refused},
    ]
    _write(path, verdict(ranking), [], tables)


def _write(path: str | Path, title: str, said: list[str], tables: list[dict[str, Any]]) -> None:
    page = document.render(
        "papers.html.j2",
        title=title,
        said=said,
        tables=[t for t in tables if t["rows"]],
        light=palette.css("light"),
        dark=palette.css("dark"),
    )
    write_bytes(path, page.encode("utf-8"))
