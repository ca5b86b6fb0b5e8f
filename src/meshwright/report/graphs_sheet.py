"""The plans that a search found for a model of a graph as text: the best, and the first of them in full."""

from __future__ import annotations

from rich.console import Console

from meshwright.answer.graph_network import NetworkPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report import graph_network_sheet, node_embedding_sheet
from meshwright.report.sheet_text import render_found
from meshwright.search.listed import FoundPlans


def render_best(found: FoundPlans, console: Console) -> None:
    """Print the best plans of a search to `console`, and the first of them in full."""
    rows = []
    for one in found.best:
        held, fits = gibibytes(one.peak_memory_bytes), "fits" if one.fits else "does not fit"
        rows.append((seconds(one.total_s), seconds(one.epoch_s), held, fits, one.plan.text()))
    whole = isinstance(found.best[0], NetworkPrediction)
    first = (graph_network_sheet if whole else node_embedding_sheet).sheet(found.best[0])
    render_found(found, ("all epochs", "an epoch", "a device", "", "plan"), rows, first, console)
