"""Served requests, predicted against measured, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.compare.served import SHARES, ServedComparison, TimePair
from meshwright.quantity import latency
from meshwright.report.compare_text import percent
from meshwright.report.page import Page
from meshwright.report.serving_text import LATENCIES


def render(comparison: ServedComparison, console: Console) -> None:
    """Print the comparison to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(comparison), "bold green" if comparison.near else "bold"))
        for name, (ours, theirs) in comparison.differ.items():
            page.quiet(f"{name} differs: {ours} predicted, {theirs} measured")
        for title, remark, head, rows in tables(comparison):
            page.title(title)
            if remark:
                page.quiet(remark)
            _rows(page, head, rows)


def tables(comparison: ServedComparison) -> list[tuple[str, str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Return what is told as tables: (title, remark, names of columns, rows of cells) of each."""
    when = "nowhere over time" if comparison.parts_s is None else f"from {comparison.parts_s:.4g} s on"
    groups = [(one.name, f"{one.requests:,}", percent(one.ttft), percent(one.tpot)) for one in comparison.groups]
    latencies = [_latency(one) for one in comparison.times]
    within, shares = _distributions(comparison)
    return [
        ("Latency of a request: predicted, measured", "", ("", "mean", "p50", "p90", "p99"), latencies),
        ("The share of requests within a time: predicted, measured", "", within, shares),
        (
            "Requests answered and waiting over time: predicted, measured",
            "",
            ("from", "answered", "waiting"),
            _states(comparison),
        ),
        (
            "Where they part",
            f"requests answered and waiting: {when}",
            ("requests by", "measured", "TTFT", "TPOT"),
            groups,
        ),
    ]


def verdict(comparison: ServedComparison) -> str:
    """``TTFT +3.2% (p90 +5.0%) | TPOT -1.0% (p90 +0.3%) | 60 and 60 requests``."""
    said = [f"{t.name[:4].upper()} {percent(t.error())} (p90 {percent(t.error('p90'))})" for t in comparison.times[:2]]
    ours, theirs = comparison.requests
    rates = " and ".join(f"{rate:.3g}" for rate in comparison.throughput_req_per_s)
    return " | ".join([*said, f"{ours:,} and {theirs:,} requests, {rates} a second"])


def _latency(one: TimePair) -> tuple[str, ...]:
    parts = ("mean", "p50", "p90", "p99")
    cells = (
        f"{latency(getattr(one.predicted, p))}, {latency(getattr(one.measured, p))} {percent(one.error(p))}"
        for p in parts
    )
    return LATENCIES[one.name].partition(" (")[2].rstrip(")"), *cells


def _distributions(comparison: ServedComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    some = [place for place, share in enumerate(SHARES) if round(share * 100) in (10, 25, 50, 75, 90, 95)]
    rows = []
    for one in comparison.times:
        if one.predicted_cdf and one.measured_cdf:
            pairs = (f"{latency(one.predicted_cdf[i])}, {latency(one.measured_cdf[i])}" for i in some)
            rows.append((LATENCIES[one.name].partition(" (")[2].rstrip(")"), *pairs))
    return ("", *(f"{SHARES[i]:.0%}" for i in some)), rows


def _states(comparison: ServedComparison) -> list[tuple[str, ...]]:
    return [
        (
            f"{one.begin_s:.4g} s",
            f"{one.predicted_batch:.1f}, {one.measured_batch:.1f}",
            f"{one.predicted_queue:.1f}, {one.measured_queue:.1f}",
        )
        for one in comparison.windows[::2]
    ]


def _rows(page: Page, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    titles = tuple(Text(cell, "dim", justify="right" if place else "left") for place, cell in enumerate(head))
    page.rows([titles, *(tuple(Text(c, justify="right" if i else "left") for i, c in enumerate(row)) for row in rows)])
