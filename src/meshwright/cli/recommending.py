"""``meshwright predict`` and ``search`` of a recommendation model, whose workload is samples and whose plan tables."""

from __future__ import annotations

from typing import Any

from meshwright.cli.question import WANTED, Question, path_of
from meshwright.cli.sheets import PartsRead, limits, of_others, show, show_found, unsearchable, unwritable_files
from meshwright.errors import Diagnostic

#: What such a question needs, and how it is written; a prediction needs a plan besides.
NEEDED = {"model": WANTED["model"], "on": WANTED["on"], "train": "--train batch=65536"}
PLANNED = {"plan": '--plan "embeddings=auto"'}
NOUN = "a recommendation model's step"


def is_of_tables(question: Question) -> bool:
    """Whether a question is about a recommendation model."""
    from meshwright.spec.recommender import is_recommender

    return is_recommender(path_of(question.model, question.base))


def predict_recommended(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer a question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *of_others(question, given, "predict", NOUN), *unwritable_files(given)]
    reading = PartsRead(question, wrong)
    reading.missing(NEEDED | PLANNED, "predict")
    model, cluster, work, costs, plan = reading.done(*_read(reading), reading.plan())
    from meshwright.answer.recommending import predict_recommending
    from meshwright.report.recommending_sheet import sheet

    return show(predict_recommending(model, cluster, work, plan, costs=costs), sheet, given)


def search_recommended(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search the ways of placing a model's tables and print the best; 0 when a plan fits, 1 when none does.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    reading = PartsRead(question, [*wrong, *of_others(question, given, "search", NOUN), *unsearchable(given)])
    reading.missing(NEEDED, "search")
    model, cluster, work, costs = reading.done(*_read(reading))
    from meshwright.report.recommending_sheet import render_best
    from meshwright.search.recommending import find_recommending

    found = find_recommending(model, cluster, work, costs=costs, **limits(given))
    return show_found(found, render_best, question, given, work.text())


def _read(reading: PartsRead) -> tuple[Any, ...]:
    """Model, cluster, workload and costs (None where no framework is named)."""
    from meshwright.spec.recommender import load_recommender
    from meshwright.spec.samples import parse_samples

    asked = reading.question
    return (
        reading.part(asked.model, lambda: load_recommender(reading.path(asked.model))),
        reading.cluster("tables are placed"),
        reading.part(asked.train, lambda: parse_samples(asked.train)),
        reading.costs(),
    )
