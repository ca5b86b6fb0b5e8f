"""An epoch of a graph network as text: the verdict, where its time goes, what is sent, memory, what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.graph_network import NetworkPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.bars import bar
from meshwright.report.page import Page
from meshwright.report.verdict_text import verdict
from meshwright.simulate.graph_network import PLACES

#: Cells of a bar.
CELLS = 24


def render(prediction: NetworkPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _places, _sent, _memory, _basis):
            part(prediction, page)


def _verdict(prediction: NetworkPrediction, page: Page) -> None:
    question = [("model", prediction.model.name), ("cluster", prediction.cluster.name)]
    question += [("workload", prediction.work.text()), ("plan", prediction.plan.text())]
    rate = f"{prediction.model.vertices / prediction.epoch_s:,.0f} vertices/s"
    verdict(page, prediction.epoch, "an epoch", rate, prediction.memory, prediction.cautions, question)


def _places(prediction: NetworkPrediction, page: Page) -> None:
    page.title("Where the time of an epoch goes (mean over stages)")
    total, at, rows = prediction.epoch_s, 0.0, []
    for place, words in PLACES.items():
        spent = prediction.times.places[place]
        if spent <= 1e-6 * total:
            continue
        drawn = bar(at / total, spent / total, CELLS, unicode=page.unicode)
        rows.append((Text(place), Text(seconds(spent)), Text(f"{spent / total:.1%}"), Text(drawn), Text(words, "dim")))
        at += spent
    page.rows(rows)


def _sent(prediction: NetworkPrediction, page: Page) -> None:
    lowered = prediction.times.lowered
    page.title("Sent in an epoch, by all devices")
    lines = [
        ("vertices that others need", gibibytes(lowered.boundary_bytes)),
        ("chunks between stages", gibibytes(lowered.stage_bytes)),
        ("other devices that need a vertex", f"{lowered.cut.copies:.4g}"),
        ("edges of the busiest device, over the mean", f"{lowered.cut.skew:.4g}"),
        ("layers of each stage", ", ".join(map(str, lowered.layers))),
    ]
    page.rows([(Text(name, "dim"), Text(value)) for name, value in lines])


def _memory(prediction: NetworkPrediction, page: Page) -> None:
    tightest = max(prediction.memory, key=lambda rank: rank.peak_bytes)
    page.title(f"Memory of the fullest device: {tightest.rank} (x{tightest.multiplicity})")
    page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in tightest.alive.items()])


def _basis(prediction: NetworkPrediction, page: Page) -> None:
    page.title("Assumptions")
    rows = [(a, "yellow" if a.flagged else "dim") for a in prediction.assumptions]
    said = [f"{a.value} ({a.source})" if a.source else a.value for a, _ in rows]
    page.rows([(Text(a.name, style), Text(text)) for (a, style), text in zip(rows, said)])
