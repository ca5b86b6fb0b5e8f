"""Training of a graph's vectors as text: the verdict, where a pass spends its time, its buckets, memory, what it rests
on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.node_embedding import NodePrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.bars import bar
from meshwright.report.page import Page
from meshwright.report.verdict_text import verdict
from meshwright.simulate.bucket_training import PLACES

#: Cells of a bar, and rounds that are listed.
CELLS, SHOWN = 24, 6


def render(prediction: NodePrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _places, _buckets, _memory, _basis):
            part(prediction, page)


def _verdict(prediction: NodePrediction, page: Page) -> None:
    question = [("model", prediction.model.name), ("cluster", prediction.cluster.name)]
    question += [("workload", prediction.work.text()), ("plan", prediction.plan.text())]
    rate = f"{prediction.samples_per_s:,.0f} samples/s"
    epochs = f"all {prediction.work.epochs:,} epochs" if prediction.work.epochs > 1 else "the epoch"
    verdict(page, prediction.total, epochs, rate, (prediction.memory,), prediction.cautions, question)


def _places(prediction: NodePrediction, page: Page) -> None:
    times = prediction.times
    page.title(f"Where the time of a pass over all buckets goes ({seconds(times.pass_s)}, mean over devices)")
    total, at, rows = times.pass_s, 0.0, []
    for place, words in PLACES.items():
        spent = times.places[place]
        if spent <= 1e-6 * total:
            continue
        drawn = bar(at / total, spent / total, CELLS, unicode=page.unicode)
        rows.append((Text(place), Text(seconds(spent)), Text(f"{spent / total:.1%}"), Text(drawn), Text(words, "dim")))
        at += spent
    page.rows(rows)


def _buckets(prediction: NodePrediction, page: Page) -> None:
    lowered, said = prediction.times.lowered, prediction.plan.buckets
    page.title(f"Buckets: {said.partitions**2:,} of {lowered.samples:,.0f} samples, in {len(lowered.rounds):,} rounds")
    lines = [
        ("passes over all buckets", f"{prediction.passes:,.4g}"),
        ("an epoch", seconds(prediction.epoch_s)),
        ("a partition", gibibytes(lowered.item_bytes)),
        ("loaded and stored in a pass", gibibytes(prediction.swapped_bytes)),
    ]
    page.rows([(Text(name, "dim"), Text(value)) for name, value in lines])
    for number, one in enumerate(lowered.rounds[:SHOWN]):
        drawn = "  ".join("-" if bucket is None else f"({bucket.head}, {bucket.tail})" for bucket in one[:8])
        page.quiet(f"round {number}: {drawn}{' ...' if len(one) > 8 else ''}")
    if len(lowered.rounds) > SHOWN:
        page.quiet(f"{len(lowered.rounds) - SHOWN} more rounds: --json has all")


def _memory(prediction: NodePrediction, page: Page) -> None:
    page.title("Memory of a device")
    page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in prediction.memory.alive.items()])
    if prediction.host_bytes:
        room = gibibytes(prediction.cluster.islands[0].node.host_memory_bytes)
        page.title(f"Memory of a host, of {room}")
        page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in prediction.host_bytes.items()])


def _basis(prediction: NodePrediction, page: Page) -> None:
    page.title("Assumptions")
    rows = [(a, "yellow" if a.flagged else "dim") for a in prediction.assumptions]
    page.rows([(Text(a.name, style), Text(f"{a.value} ({a.source})")) for a, style in rows])
