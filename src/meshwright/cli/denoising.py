"""``meshwright predict --denoise``: how long a diffusion model takes to make images under a plan, and ``search``: under
which plan it makes them soonest."""

from __future__ import annotations

from typing import Any

from meshwright.cli.question import WANTED, Question
from meshwright.cli.sheets import PartsRead, limits, of_others, show, show_found, unsearchable, unwritable_files
from meshwright.errors import Diagnostic

#: What such a question needs, and how it is written; a prediction needs a plan besides.
NEEDED = {"model": WANTED["model"], "on": WANTED["on"]}
PLANNED = {"plan": '--plan "cp8 allgather stale=patches"'}
NOUN, OWN = "images", ("denoise",)


def predict_denoised(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer the question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *of_others(question, given, "predict", NOUN, OWN), *unwritable_files(given)]
    reading = PartsRead(question, wrong)
    reading.missing(NEEDED | PLANNED, "predict")
    model, cluster, denoise, costs, plan = reading.done(*_read(reading), reading.plan())
    from meshwright.answer.denoising import predict_denoising
    from meshwright.report.denoising_sheet import sheet

    return show(predict_denoising(model, cluster, denoise, plan, costs=costs), sheet, given)


def search_denoised(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search the plans that make the images and print the best; 0 when a plan fits, 1 when none does.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    reading = PartsRead(question, [*wrong, *of_others(question, given, "search", NOUN, OWN), *unsearchable(given)])
    reading.missing(NEEDED, "search")
    model, cluster, denoise, costs = reading.done(*_read(reading))
    from meshwright.report.denoising_sheet import render_best
    from meshwright.search.denoising import find_denoising

    found = find_denoising(model, cluster, denoise, costs=costs, **limits(given))
    return show_found(found, render_best, question, given, denoise.text(), "denoise")


def _read(reading: PartsRead) -> tuple[Any, ...]:
    """Model, cluster, workload and costs (None where no framework is named)."""
    from meshwright.spec.denoise import parse

    asked = reading.question
    return (
        reading.model(),
        reading.cluster("images are made"),
        reading.part(asked.denoise, lambda: parse(asked.denoise)),
        reading.costs(),
    )
