"""Images that a diffusion model makes, as text: the verdict, a step and its exchanges, memory, what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.denoising import DenoisingPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page
from meshwright.report.verdict_text import verdict


def render(prediction: DenoisingPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _steps, _memory, _basis):
            part(prediction, page)


def _verdict(prediction: DenoisingPrediction, page: Page) -> None:
    many = "an image" if prediction.denoise.images == 1 else f"{prediction.denoise.images} images"
    question = [("model", prediction.model.name), ("cluster", prediction.cluster.name)]
    question += [("images", prediction.denoise.text()), ("plan", prediction.plan.text())]
    rate = f"{prediction.images_per_s:.3g} images/s"
    verdict(page, prediction.latency, f"for {many}", rate, prediction.memory, prediction.cautions, question)


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
