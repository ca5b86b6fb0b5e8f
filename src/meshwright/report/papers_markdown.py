"""Published systems in the book: the table of all of them, and those made of one idea."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.atomic import write_bytes
from meshwright.papers.record import IDEAS, Paper
from meshwright.papers.state import State
from meshwright.report.papers_text import counts

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
        "training or serving computes what it would without the technique. A source that is *unverified* could not be",
        "looked up; others were confirmed in the papers' own pages or in reference lists of public repositories.",
        "",
        f"{counts(rows)}.",
        "",
        "By idea: " + ", ".join(f"[{title}](idea-{name}.md)" for name, title in IDEAS.items()) + ".",
    ]
    for area in dict.fromkeys(p.area for p, _ in rows):
        out += ["", f"## {area}", "", *_table([(p, s) for p, s in rows if p.area == area])]
    return "\n".join(out) + "\n"


def _table(rows: Rows) -> list[str]:
    heads = ("paper", "state", "executed", "kind", "what it does", "source", "missing")
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for p, s in rows:
        kind = "exact" if p.exact else "approximate"
        cells = (f"**{p.id}** {p.title}", s.state, s.executed, kind, p.mechanism, p.cited, s.why)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def listed(rows: Rows, idea: str) -> str:
    """The papers made of one idea, as a list: first those that work."""
    mine = [(p, s) for p, s in rows if idea in p.ideas]
    order = {"works": 0, "partly": 1, "not yet": 2}
    lines = [f"- **{p.id}** ({s.state}): {p.mechanism}" for p, s in sorted(mine, key=lambda r: order[r[1].state])]
    return "\n".join(lines) + "\n"


def refreshed(text: str, rows: Rows) -> str:
    """A page with its lists of papers written anew."""
    return LISTED.sub(lambda m: f"{m[1]}{listed(rows, m[2])}{m[3]}", text)
