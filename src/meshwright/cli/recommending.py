"""``meshwright predict`` and ``search`` of a recommendation model, whose workload is samples and whose plan tables."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import GOAL, WANTED, WORLD, Question, beside, path_of
from meshwright.cli.sheets import show, unwritable_files
from meshwright.errors import Diagnostic, MeshwrightError

#: What such a question needs, and how it is written.
NEEDED = {"model": WANTED["model"], "on": WANTED["on"], "train": "--train batch=65536"}
#: Options of other questions, by command.
OTHERS = {
    "predict": ("job_trace", "records", "slo", "engine_profile"),
    "search": (
        *("slo", "day", "rates", "goodput", "for_", "headroom", "risk", "robust", "runnable", "strategy", "objective"),
        *("pareto", "variants", "pick", "report", "plot", "store"),
    ),
}


def is_of_tables(question: Question) -> bool:
    """Whether a question is about a recommendation model."""
    from meshwright.spec.recommender import is_recommender

    return is_recommender(path_of(question.model, question.base))


def predict_recommended(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer a question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    from meshwright.plan import parse

    wrong = [*wrong, *_of_others(question, given, "predict"), *unwritable_files(given)]
    parts = _read(question, wrong, "predict", plan=lambda: parse(path_of(question.plan, question.base)))
    from meshwright.answer.recommending import predict_recommending
    from meshwright.report.recommending_sheet import sheet

    model, cluster, work, costs, plan = parts
    return show(predict_recommending(model, cluster, work, plan, costs=costs), sheet, given)


def search_recommended(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search the ways of placing a model's tables and print the best; 0 when a plan fits, 1 when none does.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *_of_others(question, given, "search"), *unwritable(given.save, "--save")]
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    model, cluster, work, costs, _ = _read(question, wrong, "search")
    from meshwright.search.recommending import find_recommending

    limits = {name: getattr(given, name) for name in ("fix", "bound", "exclude", "allow")}
    found = find_recommending(model, cluster, work, costs=costs, top=int(given.top or 5), **limits)
    if given.json:
        print_json(found.to_json())
    else:
        from meshwright.report.recommending_sheet import render_found

        render_found(found, console())
    if given.save:
        from meshwright.plan.toml import save

        said = {field: getattr(question, field) for field in ("model", "on", "framework") if getattr(question, field)}
        said = {field: beside(path_of(text, question.base), given.save) for field, text in said.items()}
        save(found.best[0].plan, given.save, said | {"train": work.text()})
        note(f"wrote {given.save}: meshwright predict {given.save} says more")
    return 0 if found.fits else 1


def _read(question: Question, wrong: list[Diagnostic], command: str, plan: Any = None) -> list[Any]:
    """Model, cluster, workload, costs and plan; None for costs where no framework is named, and for no plan."""
    from meshwright.spec.cluster import load
    from meshwright.spec.cluster_range import is_range
    from meshwright.spec.recommender import load_recommender
    from meshwright.spec.samples import parse_samples

    needed = NEEDED | ({"plan": '--plan "embeddings=auto"'} if plan is not None else {})
    wrong = [*wrong, *options.missing(msgspec.structs.asdict(question), needed, command=command)]

    def read(text: str, reader: Any) -> Any:
        try:
            return reader() if text else None
        except MeshwrightError as error:
            wrong.extend(error.diagnostics)
            return None

    def costs() -> Any:
        from meshwright.cost import load_framework, standard

        return standard(load_framework(question.framework))

    if is_range(question.on):
        message = f"{question.on!r} is a range of clusters, and tables are placed on one"
        wrong.append(Diagnostic(code="B005", message=message, place=f"--on {question.on}", help="say one cluster"))
    parts = [
        read(question.model, lambda: load_recommender(path_of(question.model, question.base))),
        None if is_range(question.on) else read(question.on, lambda: load(path_of(question.on, question.base))),
        read(question.train, lambda: parse_samples(question.train)),
        read(question.framework, costs),
        None if plan is None else read(question.plan, plan),
    ]
    if wrong:
        raise MeshwrightError(wrong)
    return parts


def _of_others(question: Question, given: Any, command: str) -> list[Diagnostic]:
    """X004 for what is of other questions."""
    said = [f"--{name}" for name in (*GOAL, *WORLD, "serve", "denoise", "rollout") if getattr(question, name)]
    said += [f"--{name.strip('_').replace('_', '-')}" for name in OTHERS[command] if getattr(given, name, "")]
    where = f"meshwright {command}"
    message = "says nothing of a recommendation model's step"
    return [Diagnostic(code="X004", message=f"{name} {message}", place=where, help="drop it") for name in said]
