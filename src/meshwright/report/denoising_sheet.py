"""Images that a diffusion model makes, as a sheet: a step and its exchanges, memory."""

from __future__ import annotations

from rich.console import Console

from meshwright.answer.denoising import DenoisingPrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.sheet import Lines, Sheet, fullest, headline
from meshwright.report.sheet_text import render_found
from meshwright.search.listed import FoundPlans


def sheet(prediction: DenoisingPrediction) -> Sheet:
    """Return the answer as a sheet."""
    times, memory = prediction.times, prediction.memory
    many = "an image" if prediction.denoise.images == 1 else f"{prediction.denoise.images} images"
    steps = [
        ("a step", seconds(times.step_s)),
        ("a step that waits for its exchanges", seconds(times.waiting_s)),
        ("computed by the busiest rank", seconds(times.computed_s)),
        ("waited for", seconds(prediction.exposed_s)),
        ("sent between patches by a rank", f"{times.sent_bytes / 1e6:,.1f} MB"),
    ]
    if times.mixed_bytes:
        steps.append(("summed over experts by a rank", f"{times.mixed_bytes / 1e6:,.3g} MB"))
    return Sheet(
        name=f"{prediction.model.name} on {prediction.cluster.name}",
        fits=prediction.fits,
        headline=headline(prediction.latency, f"for {many}", f"{prediction.images_per_s:.3g} images/s", memory),
        question=(
            ("model", prediction.model.name),
            ("cluster", prediction.cluster.name),
            ("images", prediction.denoise.text()),
            ("plan", prediction.plan.text()),
        ),
        sections=(Lines("Denoising steps", steps),),
        memory=memory,
        held=(fullest(memory),),
        assumptions=prediction.assumptions,
        cautions=prediction.cautions,
    )


def render_best(found: FoundPlans, console: Console) -> None:
    """Print the best plans of a search to `console`, and the first of them in full."""
    rows = []
    for one in found.best:
        held, fits = gibibytes(one.peak_memory_bytes), "fits" if one.fits else "does not fit"
        rows.append((seconds(one.latency.value), f"{one.images_per_s:.3g} images/s", held, fits, one.plan.text()))
    render_found(found, ("latency", "", "a device", "", "plan"), rows, sheet(found.best[0]), console)
