"""Published systems in the book: the table of all of them, and those made of one idea."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from meshwright.atomic import write_bytes
from meshwright.papers.outcome import NEAR, Figure
from meshwright.papers.record import IDEAS, Paper
from meshwright.papers.state import State
from meshwright.report.papers_text import counts, shown

Rows = list[tuple[Paper, State]]
#: What stands in the page of an idea between these lines is written from the rows.
LISTED = re.compile(r"(<!-- papers of (\w+) -->\n).*?(<!-- end of papers -->)", re.DOTALL)


def write(rows: Rows, path: str | Path) -> None:
    """Write the table of `rows` to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, page(rows).encode("utf-8"))


def page(rows: Rows) -> str:
    """The page of all rows."""
    out = [
        "# Papers",
        "",
        "Published systems and whether their figures are reproduced here. Written by `python docs/refresh.py` from",
        "what the checks found; nothing here is typed. `meshwright papers` prints it, `meshwright reproduce ID`",
        "shows a paper's figures beside ours, `meshwright whatif` puts its recipe over a plan of yours.",
        "",
        "*works*: every figure and fact that the row's check judges holds, and the paper is confirmed. *partly*: the",
        "check runs, and what is off or missing is said. *not yet*: no check, or nothing of it holds. *exact*:",
        "training or serving computes what it would without the technique. *executed*: real processes carried out the",
        "part of the recipe that can be trained, and what they trained equals one process in losses, gradients and",
        "parameters (float64, 1e-9), or they did what the row's own claim asks for; where torch is not installed it",
        "says *not executed here*, and states are those of what is simulated. A source that is *unverified* could not",
        "be looked up; others were confirmed in the papers' own pages or in reference lists of public repositories.",
        "",
        "A row that works as a *recipe for a plan* is one that `whatif` puts over a plan of yours. The others work",
        "inside their check alone, as a model of the mechanism or with processes of its own: no plan switches them on.",
        "",
        f"{counts(rows)}.",
        "",
        "By idea: " + ", ".join(f"[{title}](idea-{name}.md)" for name, title in IDEAS.items()) + ".",
    ]
    for area in dict.fromkeys(p.area for p, _ in rows):
        out += ["", f"## {area}", "", *_table([(p, s) for p, s in rows if p.area == area])]
    figures = [(p, f) for p, s in rows for f in s.figures]
    if figures:
        out += [
            "",
            "## Figures of the papers and ours",
            "",
            f"Every figure that a paper gives and a check computes: {len(figures)} in all, "
            f"{sum(not f.missed for _, f in figures)} of them within {NEAR:.0%} or, where the paper gives a bound,",
            "inside it. Of the others the last column says why.",
            "",
            *_figures(figures),
        ]
    return "\n".join(out) + "\n"


def _figures(figures: list[tuple[Paper, Figure]]) -> list[str]:
    heads = ("paper", "figure", "paper's", "ours", "error", "asked", "met", "why it is off")
    rows = [(p.id, *shown(f), "yes" if f.ok else "no", f.why if f.missed else "") for p, f in figures]
    return _lines(heads, rows)


def _lines(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _table(rows: Rows) -> list[str]:
    heads = ("paper", "state", "executed", "kind", "what it does", "source", "missing")
    kinds = {True: "exact", False: "approximate"}
    return _lines(
        heads,
        [(f"**{p.id}** {p.title}", s.state, s.executed, kinds[p.exact], p.mechanism, p.cited, s.why) for p, s in rows],
    )


def listed(rows: Rows, idea: str) -> str:
    """The papers made of one idea, as a list: first those that work."""
    mine = [(p, s) for p, s in rows if idea in p.ideas]
    order = {"works": 0, "partly": 1, "not yet": 2}
    lines = [f"- **{p.id}** ({s.state}): {p.mechanism}" for p, s in sorted(mine, key=lambda r: order[r[1].state])]
    return "\n".join(lines) + "\n"


def refreshed(text: str, rows: Rows) -> str:
    """A page with its lists of papers written anew."""
    return LISTED.sub(lambda m: f"{m[1]}{listed(rows, m[2])}{m[3]}", text)
