"""The plans that a search found for a model of a graph as text: the best, and the first of them in full."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.graph_network import NetworkPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report import graph_network_sheet, node_embedding_sheet
from meshwright.report.page import Page
from meshwright.report.sheet_text import render
from meshwright.search.graphs import FoundGraph


def render_found(found: FoundGraph, console: Console) -> None:
    """Print the best plans of a search to `console`, and the first of them in full."""
    with Page(console) as page:
        page.print(Text(f"{found.evaluated} plans, the best:", "bold"))
        rows = [tuple(Text(word, "dim") for word in ("all epochs", "an epoch", "a device", "", "plan"))]
        for one in found.best:
            held, fits = gibibytes(one.peak_memory_bytes), "fits" if one.fits else "does not fit"
            rows.append(tuple(map(Text, (seconds(one.total_s), seconds(one.epoch_s), held, fits, one.plan.text()))))
        page.rows(rows)
        page.print()
    whole = isinstance(found.best[0], NetworkPrediction)
    render((graph_network_sheet if whole else node_embedding_sheet).sheet(found.best[0]), console)
