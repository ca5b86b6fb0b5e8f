"""Images that a diffusion model makes, as text: the verdict, a step and its exchanges, memory, what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.denoising import DenoisingPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page


def render(prediction: DenoisingPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _steps, _memory, _basis):
            part(prediction, page)


def _verdict(prediction: DenoisingPrediction, page: Page) -> None:
    low, high = prediction.latency.interval or (prediction.latency.value,) * 2
    tightest = max(prediction.memory, key=lambda rank: rank.peak_bytes)
    fits = "fits" if prediction.fits else "does not fit"
    held = f"{gibibytes(tightest.peak_bytes)} of {gibibytes(tightest.capacity_bytes)}"
    many = "an image" if prediction.denoise.images == 1 else f"{prediction.denoise.images} images"
    took = f"{seconds(prediction.latency.value)} [{seconds(low)}, {seconds(high)}] for {many}"
    style = "bold green" if prediction.fits else "bold red"
    page.print(Text(f"{fits}: {held} | {took} | {prediction.images_per_s:.3g} images/s", style))
    for caution in prediction.cautions:
        page.print(Text(f"! {caution}", "yellow"), indent=2)
    rows = [("model", prediction.model.name), ("cluster", prediction.cluster.name)]
    rows += [("images", prediction.denoise.text()), ("plan", prediction.plan.text())]
    page.print()
    page.rows([(Text(name, "dim"), Text(value)) for name, value in rows])


def _steps(prediction: DenoisingPrediction, page: Page) -> None:
    times = prediction.times
    rows = [
        ("a step", seconds(times.step_s)),
        ("a step that waits for its exchanges", seconds(times.waiting_s)),
        ("computed by the busiest rank", seconds(times.computed_s)),
        ("waited for", seconds(prediction.exposed_s)),
        ("sent between patches by a rank", f"{times.sent_bytes / 1e6:,.1f} MB"),
    ]
    page.print()
    page.print(Text("Denoising steps", "bold"))
    page.rows([(Text(name, "dim"), Text(value)) for name, value in rows])


def _memory(prediction: DenoisingPrediction, page: Page) -> None:
    tightest = max(prediction.memory, key=lambda rank: rank.peak_bytes)
    page.print()
    page.print(Text(f"Memory of the fullest rank: {tightest.rank} (x{tightest.multiplicity})", "bold"))
    page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in tightest.alive.items()])


def _basis(prediction: DenoisingPrediction, page: Page) -> None:
    page.print()
    page.print(Text("Assumptions", "bold"))
    rows = [(a, "yellow" if a.flagged else "dim") for a in prediction.assumptions]
    page.rows([(Text(a.name, style), Text(f"{a.value} ({a.source})")) for a, style in rows])
