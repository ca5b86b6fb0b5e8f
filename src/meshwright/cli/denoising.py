"""``meshwright predict --denoise``: how long a diffusion model takes to make images under a plan, and ``search``: under
which plan it makes them soonest."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.question import GOAL, WANTED, Question, read_parts
from meshwright.cli.sheets import PartsRead, limits, of_others, show, show_found, unsearchable, unwritable_files
from meshwright.errors import Diagnostic, MeshwrightError

#: What such a question needs, and how it is written.
NEEDED = {field: how for field, how in WANTED.items() if field != "train"}
NEEDED["plan"] = '--plan "cp8 allgather stale=patches"'
NOUN = "images"
#: Options of other questions, and files that are written of these alone.
OTHERS = ("train", "serve", *GOAL, "world")
FILES = ("job_trace", "records", "slo", "engine_profile")


def predict_denoised(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer the question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *options.missing(msgspec.structs.asdict(question), NEEDED, command="predict")]
    wrong += _of_others(question, given) + unwritable_files(given)
    parts, found = read_parts(msgspec.structs.replace(question, train="", framework=""))
    wrong += found
    from meshwright.spec.denoise import parse

    denoise = costs = None
    try:
        denoise = parse(question.denoise)
        if question.framework:
            from meshwright.cost import load_framework, standard

            costs = standard(load_framework(question.framework))
    except MeshwrightError as error:
        wrong += error.diagnostics
    if wrong or denoise is None:
        raise MeshwrightError(wrong)
    from meshwright.answer.denoising import predict_denoising
    from meshwright.report.denoising_sheet import sheet

    model, cluster, plan = parts
    return show(predict_denoising(model, cluster, denoise, plan, costs=costs), sheet, given)


def search_denoised(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search the plans that make the images and print the best; 0 when a plan fits, 1 when none does.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    from meshwright.spec.denoise import parse
    from meshwright.spec.model import load

    others = of_others(msgspec.structs.replace(question, denoise=""), given, "search", NOUN)
    others += [_alien("--train", "search")] if question.train else []
    reading = PartsRead(question, [*wrong, *others, *unsearchable(given)])
    reading.missing({field: how for field, how in NEEDED.items() if field != "plan"}, "search")
    parts = reading.done(
        reading.part(question.model, lambda: load(reading.path(question.model))),
        reading.cluster("images are made"),
        reading.part(question.denoise, lambda: parse(question.denoise)),
        reading.costs(),
    )
    from meshwright.report.denoising_sheet import render_best
    from meshwright.search.denoising import find_denoising

    model, cluster, denoise, costs = parts
    found = find_denoising(model, cluster, denoise, costs=costs, **limits(given))
    return show_found(found, render_best, question, given, denoise.text(), "denoise")


def _alien(name: str, command: str) -> Diagnostic:
    message, where = f"{name} says nothing of {NOUN}", f"meshwright {command} --denoise"
    return Diagnostic(code="X004", message=message, place=where, help="drop it, or drop --denoise")


def _of_others(question: Question, given: Any) -> list[Diagnostic]:
    """X004 for what is of other questions: said beside images, one of the two is meant."""
    said = [f"--{name}" for name in OTHERS if getattr(question, name)]
    said += [f"--{name.replace('_', '-')}" for name in FILES if getattr(given, name, "")]
    return [_alien(name, "predict") for name in said]
