"""Why two predictions differ, for a terminal: a waterfall from one step time to the other."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import gibibytes, seconds
from meshwright.report.bars import bar
from meshwright.report.diff import Change, Delta
from meshwright.report.page import WIDE, Page

#: Changes below this share of the larger step time are left out of the text.
NEGLIGIBLE = 5e-5
MOST_FIELDS = 12
#: From so many times the other step time on, that is what is said, in place of a percentage.
MANY_TIMES = 3


def render(delta: Delta, console: Console) -> None:
    """Print the difference to `console`: verdict, waterfall, memory, what was asked differently."""
    with Page(console) as page:
        _verdict(delta, page)
        _waterfall(delta, page)
        _memory(delta, page)
        _question(delta, page)


def _verdict(delta: Delta, page: Page) -> None:
    step = delta.step_time_s
    if not step.change:
        line = f"A and B take the same time: {seconds(step.a)}/step"
    else:
        share = f" ({step.change / step.a:+.1%})" if step.a else ""
        if step.a and step.b > MANY_TIMES * step.a:
            share = f" ({step.b / step.a:,.3g} times as long)"
        how = "slower" if step.change > 0 else "faster"
        line = f"B is {seconds(abs(step.change))} {how} than A{share}: {seconds(step.a)} -> {seconds(step.b)}"
    page.print(Text(line, "bold red" if step.change > 0 else "bold green"))
    rates = [
        ("", "A", "B"),
        ("fits", *("yes" if fits else "no" for fits in delta.fits)),
        *((r.what, *(f"{v:,.0f}" if r.a > 1 else f"{v:.1%}" for v in (r.a, r.b))) for r in delta.rates),
    ]
    page.print()
    page.rows([tuple(Text(cell, "dim" if i == 0 else "") for i, cell in enumerate(row)) for row in rates])


def _waterfall(delta: Delta, page: Page) -> None:
    step = delta.step_time_s
    chosen = [c for c in delta.causes if abs(c.change) > NEGLIGIBLE * max(step.a, step.b)]
    if not chosen:
        return
    page.title("Where the difference comes from")
    at, places = step.a, []
    for change in chosen:
        places.append((min(at, at + change.change), abs(change.change)))
        at += change.change
    low = min([step.a, step.b, *(start for start, _ in places)])
    high = max([step.a, step.b, *(start + length for start, length in places)])
    wide = page.width >= WIDE
    names = [c.what if wide else c.name for c in chosen]
    width = max(page.width - max(map(len, [*names, "A"])) - 24, 8)

    def row(name: str, value: str, start: float, length: float, style: str) -> tuple[Text, ...]:
        whole = (high - low) or 1.0
        drawn = bar((start - low) / whole, length / whole, width, unicode=page.unicode)
        return Text(name), Text(value, justify="right"), Text(drawn, style)

    tick = (high - low) * 1e-6
    rows = [row("A", seconds(step.a), step.a, tick, "bold")]
    for change, name, (start, length) in zip(chosen, names, places):
        rows.append(row(name, _signed(change), start, length, "red" if change.change > 0 else "green"))
    rows.append(row("B", seconds(step.b), step.b, tick, "bold"))
    page.rows(rows)
    page.quiet(f"bars from {seconds(low)} to {seconds(high)}")


def _signed(change: Change) -> str:
    return ("+" if change.change > 0 else "-") + seconds(abs(change.change))


def _memory(delta: Delta, page: Page) -> None:
    chosen = [c for c in (*delta.memory, delta.peak_memory_bytes) if abs(c.change) >= 0.05 * 2**30]
    if not chosen:
        return
    page.title("Memory of the fullest rank")
    rows = []
    for change in chosen:
        sign = "+" if change.change > 0 else "-"
        moved = Text(f"{sign}{gibibytes(abs(change.change))}", "red" if change.change > 0 else "green", justify="right")
        sides = Text(f"{gibibytes(change.a)} -> {gibibytes(change.b)}", "dim")
        rows.append((Text(change.what), moved, sides))
    page.rows(rows)


def _question(delta: Delta, page: Page) -> None:
    if not (delta.only_a or delta.only_b or delta.fields):
        return
    page.title("What was asked differently")
    rows = []
    if delta.only_a or delta.only_b:
        rows.append(("plan", " ".join(delta.only_a) or "-", " ".join(delta.only_b) or "-"))
    rows += [(d.field, d.a, d.b) for d in delta.fields[:MOST_FIELDS]]
    head = (Text(""), Text("A", "dim"), Text("B", "dim"))
    page.rows([head, *((Text(field, "dim"), Text(a), Text(b)) for field, a, b in rows)])
    if len(delta.fields) > MOST_FIELDS:
        page.quiet(f"and {len(delta.fields) - MOST_FIELDS} more fields: --json lists them")
