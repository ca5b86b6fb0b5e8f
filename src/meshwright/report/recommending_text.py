"""A step of a recommendation model as text: the verdict, where its time goes, its tables, memory, what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.recommending import RecommendingPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.bars import bar
from meshwright.report.page import Page
from meshwright.report.verdict_text import verdict
from meshwright.search.recommending import FoundRecommending
from meshwright.simulate.recommending import PLACES

#: Cells of a bar, and tables that are listed, the largest first.
CELLS, SHOWN = 24, 8


def render(prediction: RecommendingPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _places, _tables, _memory, _basis):
            part(prediction, page)


def render_found(found: FoundRecommending, console: Console) -> None:
    """Print the best plans of a search, and the first of them in full."""
    with Page(console) as page:
        page.print(Text(f"{found.evaluated} plans, the best:", "bold"))
        rows = [tuple(Text(word, "dim") for word in ("step", "samples/s", "fullest rank", "", "plan"))]
        for one in found.best:
            held, fits = gibibytes(one.peak_memory_bytes), "fits" if one.fits else "does not fit"
            cells = (seconds(one.step_time_s), f"{one.samples_per_s:,.0f}", held, fits, one.plan.text())
            rows.append(tuple(map(Text, cells)))
        page.rows(rows)
        page.print()
        for part in (_verdict, _places, _tables, _memory, _basis):
            part(found.best[0], page)


def _verdict(prediction: RecommendingPrediction, page: Page) -> None:
    question = [("model", prediction.model.name), ("cluster", prediction.cluster.name)]
    question += [("workload", prediction.work.text()), ("plan", prediction.plan.text())]
    rate = f"{prediction.samples_per_s:,.0f} samples/s"
    verdict(page, prediction.step_time, "a step", rate, prediction.memory, prediction.cautions, question)


def _places(prediction: RecommendingPrediction, page: Page) -> None:
    page.title("Where the time goes (mean over ranks)")
    total, at, rows = prediction.step_time_s, 0.0, []
    for place, words in PLACES.items():
        spent = prediction.times.places[place]
        if spent <= 1e-6 * total:
            continue
        drawn = bar(at / total, spent / total, CELLS, unicode=page.unicode)
        rows.append((Text(place), Text(seconds(spent)), Text(f"{spent / total:.1%}"), Text(drawn), Text(words, "dim")))
        at += spent
    page.rows(rows)


def _tables(prediction: RecommendingPrediction, page: Page) -> None:
    page.title(f"Tables: {prediction.ways}; the busiest rank {prediction.balance_gap:.1%} over the bound")
    rows = [tuple(Text(word, "dim") for word in ("table", "rows", "lookups", "memory", "way", "ranks"))]
    largest = sorted(prediction.tables, key=lambda table: -table.num_bytes)
    for one in largest[:SHOWN]:
        way = f"{one.way} x{one.slices}" if one.slices > 1 else one.way
        where = ",".join(map(str, one.ranks[:6])) + (f" and {len(one.ranks) - 6} more" if len(one.ranks) > 6 else "")
        cells = (str(one.table), f"{one.rows:,}", f"{one.pooling:g}", gibibytes(one.num_bytes), way, where)
        rows.append(tuple(map(Text, cells)))
    page.rows(rows)
    if len(largest) > SHOWN:
        page.quiet(f"{len(largest) - SHOWN} smaller tables: --json has all")


def _memory(prediction: RecommendingPrediction, page: Page) -> None:
    tightest = max(prediction.memory, key=lambda rank: rank.peak_bytes)
    page.title(f"Memory of the fullest rank: {tightest.rank} (x{tightest.multiplicity})")
    page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in tightest.alive.items()])


def _basis(prediction: RecommendingPrediction, page: Page) -> None:
    page.title("Assumptions")
    rows = [(a, "yellow" if a.flagged else "dim") for a in prediction.assumptions]
    page.rows([(Text(a.name, style), Text(f"{a.value} ({a.source})")) for a, style in rows])
