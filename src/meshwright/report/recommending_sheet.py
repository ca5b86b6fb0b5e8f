"""A step of a recommendation model as a sheet: where its time goes, its tables, memory; and a search's best plans."""

from __future__ import annotations

from rich.console import Console

from meshwright.answer.recommending import RecommendingPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.sheet import Sheet, SheetGrid, Spent, fullest, headline
from meshwright.report.sheet_text import render_found
from meshwright.search.listed import FoundPlans
from meshwright.simulate.recommending import PLACES

#: Tables that are listed, the largest first, and ranks of one.
SHOWN, RANKS = 8, 6


def sheet(prediction: RecommendingPrediction) -> Sheet:
    """Return the answer as a sheet."""
    places, memory = prediction.times.places, prediction.memory
    spent = [(place, places[place], words) for place, words in PLACES.items()]
    rate = f"{prediction.samples_per_s:,.0f} samples/s"
    return Sheet(
        name=f"{prediction.model.name} on {prediction.cluster.name}",
        fits=prediction.fits,
        headline=headline(prediction.step_time, "a step", rate, memory),
        question=(
            ("model", prediction.model.name),
            ("cluster", prediction.cluster.name),
            ("workload", prediction.work.text()),
            ("plan", prediction.plan.text()),
        ),
        sections=(Spent("Where the time goes (mean over ranks)", prediction.step_time_s, spent), _tables(prediction)),
        memory=memory,
        held=(fullest(memory),),
        assumptions=prediction.assumptions,
        cautions=prediction.cautions,
        timeline=prediction.times.timeline,
    )


def render_best(found: FoundPlans, console: Console) -> None:
    """Print the best plans of a search, and the first of them in full."""
    rows = []
    for one in found.best:
        held, fits = gibibytes(one.peak_memory_bytes), "fits" if one.fits else "does not fit"
        rows.append((seconds(one.step_time_s), f"{one.samples_per_s:,.0f}", held, fits, one.plan.text()))
    heads = ("step", "samples/s", "fullest rank", "", "plan")
    render_found(found, heads, rows, sheet(found.best[0]), console)


def _tables(prediction: RecommendingPrediction) -> SheetGrid:
    largest, rows = sorted(prediction.tables, key=lambda table: -table.num_bytes), []
    for one in largest[:SHOWN]:
        way = f"{one.way} x{one.slices}" if one.slices > 1 else one.way
        more = f" and {len(one.ranks) - RANKS} more" if len(one.ranks) > RANKS else ""
        where = ",".join(map(str, one.ranks[:RANKS])) + more
        rows.append((str(one.table), f"{one.rows:,}", f"{one.pooling:g}", gibibytes(one.num_bytes), way, where))
    return SheetGrid(
        f"Tables: {prediction.ways}; the busiest rank {prediction.balance_gap:.1%} over the bound",
        ("table", "rows", "lookups", "memory", "way", "ranks"),
        rows,
        [f"{len(largest) - SHOWN} smaller tables: --json has all"] if len(largest) > SHOWN else [],
    )
