"""Predicted against measured, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.compare import Comparison, Pair, PathRun, Row
from meshwright.quantity import gibibytes, seconds
from meshwright.report.bars import bar
from meshwright.report.page import Page

#: Links of a critical path that are printed; --json has all.
MOST_LINKS = 12
#: Errors below this are shown as good, above the second as bad.
GOOD, BAD = 0.05, 0.15


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison to `console`."""
    with Page(console) as page:
        good = comparison.within_spread and not comparison.cancelling
        page.print(Text(verdict(comparison), "bold green" if good else "bold"))
        for line in remarks(comparison):
            page.quiet(line)
        _rows("By kind of task (seconds per rank)", comparison.kinds, page)
        _rows("By queue (seconds per rank)", comparison.queues, page)
        _shares(comparison, page)
        _paths(comparison, page)
        page.quiet(unmatched(comparison))


def verdict(c: Comparison) -> str:
    """``predicted 101 ms, measured 100 ms: +1.0%, within the spread of the 5 repeats``."""
    step, (low, high) = c.step_time_s, c.measured.spread_s
    said = f"predicted {seconds(step.predicted)}/step, measured {seconds(step.measured)}: {percent(step.error)}"
    if c.measured.num_steps < 2:
        return said
    where = "within" if c.within_spread else "outside"
    right = ", so the step time is right" if c.within_spread else ""
    if right and c.cancelling:
        right += ", but by errors that cancel"
    return f"{said}, {where} the spread of {c.measured.num_steps} steps ({seconds(low)} to {seconds(high)}){right}"


def remarks(c: Comparison) -> list[str]:
    """Return the remarks on a comparison: fields of the question that differ, errors that cancel, and a spread that is
    not known."""
    out = [f"{name} differs: {a} predicted, {b} measured" for name, (a, b) in c.differ.items()]
    if c.cancelling:
        parts = [f"{row.name} {percent(row.error)} ({_gap(row)})" for row in c.cancelling]
        out.append(f"errors of the parts that cancel in the step: {', '.join(parts)}")
    out += drifted(c)
    if c.measured.num_steps == 1:
        out.append("one step was measured: its spread is not known")
    return out


def drifted(c: Comparison) -> list[str]:
    """Return what there is to say of a machine that no longer keeps the pace of its profile, with the error at that
    pace."""
    if c.pace is None or c.at_pace is None or not c.pace.drifted:
        return []
    then = f"at the pace of then a step would take {seconds(c.at_pace.measured)}, and its error would be"
    was, now = percent(c.at_pace.error), percent(c.step_time_s.error)
    help = "let other work on it end, or measure it anew: meshwright calibrate --here"
    return [f"{c.pace.said()}: {then} {was} instead of {now}; {help}"]


def _gap(row: Row) -> str:
    gap = row.predicted_s - row.measured_s
    return f"{'+' if gap > 0 else '-'}{seconds(abs(gap))}"


def unmatched(c: Comparison) -> str:
    """Return in words the numbers of tasks that both sides have, and that one of them alone has."""
    matched, ours, theirs = (
        sum(getattr(r, n) for r in c.kinds) for n in ("matched", "only_predicted", "only_measured")
    )
    return f"{matched:,} tasks on both sides, {ours:,} only predicted, {theirs:,} only measured"


def percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def _style(error: float | None) -> str:
    if error is None:
        return "dim"
    return "green" if abs(error) <= GOOD else "red" if abs(error) > BAD else "yellow"


def _rows(title: str, rows: tuple[Row, ...], page: Page) -> None:
    page.title(title)
    head = ("", "tasks", "predicted", "measured", "error", "not on the other side")
    lines = [tuple(Text(h, "dim", justify="left" if i in (0, 5) else "right") for i, h in enumerate(head))]
    for r in rows:
        lines.append(
            (
                Text(r.name),
                Text(f"{r.matched:,}", justify="right"),
                Text(seconds(r.predicted_s) if r.matched else "", justify="right"),
                Text(seconds(r.measured_s) if r.matched else "", justify="right"),
                Text(percent(r.error) if r.matched else "", _style(r.error), justify="right"),
                Text(alone(r), "dim"),
            )
        )
    page.rows(lines)


def alone(r: Row) -> str:
    """Return the tasks of a row's kind that only one side has, in words: how many and their seconds."""
    parts = []
    if r.only_predicted:
        parts.append(f"{r.only_predicted:,} predicted ({seconds(r.unmatched_predicted_s)})")
    if r.only_measured:
        parts.append(f"{r.only_measured:,} measured ({seconds(r.unmatched_measured_s)})")
    return ", ".join(parts)


def _shares(c: Comparison, page: Page) -> None:
    page.title("What is not hidden")
    rows = [("", "predicted", "measured", "")]
    rows.append(("bubble", f"{c.bubble.predicted:.1%}", f"{c.bubble.measured:.1%}", ""))
    rows += [(f"exposed {p.name}", seconds(p.predicted), seconds(p.measured), percent(p.error)) for p in c.exposed_s]
    if c.peak_memory_bytes is not None:
        rows.append(memory_row(c.peak_memory_bytes))
    page.rows(
        [
            tuple(Text(cell, "dim" if i == 0 else "", justify="right" if j else "left") for j, cell in enumerate(row))
            for i, row in enumerate(rows)
        ]
    )


def memory_row(p: Pair) -> tuple[str, str, str, str]:
    return p.name, gibibytes(p.predicted), gibibytes(p.measured), percent(p.error)


def _paths(c: Comparison, page: Page) -> None:
    page.title("Critical paths")
    whole = max(c.predicted.step_time_s, c.measured.step_time_s) or 1.0
    names = list(dict.fromkeys((*c.predicted.path_s, *c.measured.path_s)))
    width = max((page.width - max(map(len, [*names, "idle"])) - 34) // 2, 6)
    rows = [(Text(""), Text("predicted", "dim"), Text(""), Text("measured", "dim"), Text(""))]
    for name in names:
        cells = [Text(name)]
        for side in (c.predicted, c.measured):
            value = side.path_s.get(name, 0.0)
            cells += [
                Text(seconds(value) if value else "-", justify="right"),
                Text(bar(0.0, value / whole, width, unicode=page.unicode), "red" if name == "idle" else "blue"),
            ]
        rows.append(tuple(cells))
    page.rows(rows)
    for word, side in (("predicted", c.predicted), ("measured", c.measured)):
        page.print(Text(f"{word}: {path_text(side.path)}"), indent=2)


def path_text(path: tuple[PathRun, ...]) -> str:
    """``F s0 x4 > send s0 > F s1 ...``: the beginning and the end of a long one."""
    words = [f"{link.name}{f' x{link.count}' if link.count > 1 else ''}" for link in path]
    if len(words) > MOST_LINKS:
        half = MOST_LINKS // 2
        words = [*words[:half], f"... {len(words) - 2 * half} more ...", *words[-half:]]
    return " > ".join(words)
