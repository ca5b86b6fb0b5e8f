"""A measured traffic as text: how many were answered, their latencies, errors, and how exactly they were sent."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import seconds
from meshwright.report.page import Page
from meshwright.report.serving_text import LATENCIES
from meshwright.traffic.summary import TrafficSummary


def render(found: TrafficSummary, console: Console) -> None:
    """Print the figures to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(found), "bold green" if found.good else "bold red"))
        for remark in found.remarks:
            page.print(Text(f"! {remark}", "yellow"), indent=2)
        page.print()
        rows = [("server", found.url), ("model", found.model), ("requests", found.serve), ("prompts", found.prompts)]
        page.rows([(Text(a, "dim"), Text(b)) for a, b in rows])
        _latencies(found, page)
        if found.errors:
            page.title("Errors")
            page.rows([(Text(f"{count:,}", justify="right"), Text(what)) for what, count in found.errors.items()])


def verdict(found: TrafficSummary) -> str:
    """``500 of 500 answered | 8.01 requests/s | 2,050 tokens/s``, and the objectives."""
    said = [f"{found.answered:,} of {found.requests:,} answered"]
    if found.withdrawn:
        said.append(f"{found.withdrawn:,} withdrawn")
    for one in found.objectives:
        at = f"{one.said} {seconds(one.value_s)}"
        said.append(f"{at} within {seconds(one.bound_s)}" if one.met else f"{at} misses {seconds(one.bound_s)}")
    if found.metrics is not None:
        said += [
            f"{found.metrics.throughput_req_per_s:.3g} requests/s",
            f"{found.metrics.throughput_tokens_per_s:,.0f} tokens/s",
        ]
    return " | ".join(said)


def _latencies(found: TrafficSummary, page: Page) -> None:
    if found.metrics is None:
        return
    page.title("Latency of a request")
    rows = [tuple(Text(cell, "dim", justify="right" if cell else "left") for cell in ("", "mean", "p50", "p90", "p99"))]
    for name, words in LATENCIES.items():
        one = getattr(found.metrics, name)
        if name != "queue_s":  # only the server knows when it began
            values = (one.mean, one.p50, one.p90, one.p99)
            rows.append((Text(words), *(Text(seconds(value), justify="right") for value in values)))
    page.rows(rows)
    late = ", ".join(f"{name} {seconds(value)}" for name, value in zip(("p50", "p90", "p99", "most"), found.late_s))
    hits = "" if found.hit_rate is None else f", {found.hit_rate:.1%} of the prompts' tokens found in its cache"
    page.quiet(f"up to {found.peak_open:,} requests open{hits}; sent after they were due by {late}; "
               f"the client used {found.busy:.0%} of a core")  # fmt: skip
