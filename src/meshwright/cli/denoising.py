"""``meshwright predict --denoise``: how long a diffusion model takes to make images under a plan."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.question import GOAL, WANTED, Question, read_parts
from meshwright.cli.sheets import show, unwritable_files
from meshwright.errors import Diagnostic, MeshwrightError

#: What such a question needs, and how it is written.
NEEDED = {field: how for field, how in WANTED.items() if field != "train"}
NEEDED["plan"] = '--plan "cp8 allgather stale=patches"'
#: Options of other questions, and files that are written of these alone.
OTHERS = ("train", "serve", *GOAL, "world")
FILES = ("trace", "job_trace", "records", "slo", "engine_profile")


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


def _of_others(question: Question, given: Any) -> list[Diagnostic]:
    """X004 for what is of other questions: said beside images, one of the two is meant."""
    said = [f"--{name}" for name in OTHERS if getattr(question, name)]
    said += [f"--{name.replace('_', '-')}" for name in FILES if getattr(given, name, "")]
    where, help = "meshwright predict --denoise", "drop it, or drop --denoise"
    return [Diagnostic(code="X004", message=f"{n} says nothing of images", place=where, help=help) for n in said]
