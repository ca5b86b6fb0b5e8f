"""Published systems in the book: the table of all of them, and those made of one idea."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap

from meshwright.atomic import write_bytes
from meshwright.papers.outcome import LOOSE, NEAR, Figure
from meshwright.papers.record import IDEAS, Paper
from meshwright.papers.state import STATES, PaperState
from meshwright.report.papers_text import counts, shown

Rows = list[tuple[Paper, PaperState]]
#: What the page says before its tables.
STATES_SAID = (
    "Published systems and what of each a user gets. Written by `python docs/refresh.py` from what the checks "
    "found; nothing here is typed. `meshwright papers` prints it, `meshwright reproduce ID` shows a paper's figures"
    " beside ours, `meshwright whatif` puts its recipe over a plan of yours.",
    "*usable*: a word of a plan, a workload or a command switches it on for a case of yours, its mechanism runs in "
    "the simulator or the real executor, and every figure that heads the paper's claim is within its tolerance "
    "(10%, unless the row keeps another). *model only*: what its check judges is met inside that check, as a model "
    "of the mechanism or with processes of its own; no word switches it on, and what of the claim is not judged is "
    "said among its assumptions. *partly*: what is off or missing is said. *not yet*: nothing is computed, or "
    "nothing of it that holds could have failed. A figure on the same side of 1, the paper's own table worked out "
    "again or a definition restated supports no state.",
    "*exact*: training or serving computes what it would without the technique. *executed*: real processes carried "
    "out the part of the recipe that can be trained, and what they trained equals one process in losses, gradients "
    "and parameters (float64, 1e-9), or they did what the row's own claim asks for; where torch is not installed it"
    " says *not executed here*, and states are those of what is simulated. A source that is *unverified* could not "
    "be looked up; others were confirmed in the papers' own pages or in reference lists of public repositories.",
)
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
        *(line for paragraph in STATES_SAID for line in (*wrap(paragraph, 116, break_on_hyphens=False), "")),
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
            f"Every figure that a paper gives and a check computes: {len(figures)} in all. {_told(figures)}",
            f"A figure that heads its claim is in bold. Of those further off than {NEAR:.0%} the last column says why.",
            "",
            *_figures(figures),
        ]
    return "\n".join(out) + "\n"


def _told(figures: list[tuple[Paper, Figure]]) -> str:
    """Return the number of figures that are evidence, and of those that are met."""
    judged = [f for _, f in figures if f.judge not in LOOSE and not f.restated]
    met, near = sum(f.ok for f in judged), sum(not f.missed for f in judged)
    return (
        f"{len(figures) - len(judged)} of them are shown, on a side of 1 or the paper's own numbers restated, which "
        f"supports nothing. Of the other {len(judged)}, {met} are within their tolerance, {near} within {NEAR:.0%} or "
        "a bound."
    )


def _figures(figures: list[tuple[Paper, Figure]]) -> list[str]:
    heads = ("paper", "figure", "paper's", "ours", "error", "asked", "met", "why it is off")
    rows = [
        (p.id, f"**{what}**" if f.headline else what, *cells, "yes" if f.ok else "no", f.why if f.missed else "")
        for p, f in figures
        for what, *cells in [shown(f)]
    ]
    return _lines(heads, rows)


def _lines(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _table(rows: Rows) -> list[str]:
    heads = ("paper", "state", "executed", "kind", "what it does", "switched on by", "source", "missing")
    kinds = {True: "exact", False: "approximate"}
    return _lines(
        heads,
        [
            (
                f"**{p.id}** {p.title}",
                s.state,
                s.executed,
                kinds[p.exact],
                p.mechanism,
                f"`{p.switch.words}`" if p.switch else "",
                p.cited,
                s.why,
            )
            for p, s in rows
        ],
    )


def listed(rows: Rows, idea: str) -> str:
    """The papers made of one idea, as a list: first those of use."""
    mine = sorted(((p, s) for p, s in rows if idea in p.ideas), key=lambda row: STATES.index(row[1].state))
    lines = [f"- **{p.id}** ({s.state}): {p.mechanism}" for p, s in mine]
    return "\n".join(lines) + "\n"


def refreshed(text: str, rows: Rows) -> str:
    """A page with its lists of papers written anew."""
    return LISTED.sub(lambda m: f"{m[1]}{listed(rows, m[2])}{m[3]}", text)
