"""The question that the page opens with, from what the command line says: names stay names, files become their text."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.cli.question import GOAL, OPTIONAL, Question
from meshwright.errors import Diagnostic, MeshwrightError


def as_page(question: Question) -> dict[str, str]:
    """The texts that the page's fields start with.

    Raises:
        MeshwrightError: what is wrong with a file that is named, all at once.
    """
    from meshwright.plan import parse
    from meshwright.spec import cluster, model

    texts = ("model", "on", "train", *OPTIONAL, *GOAL)
    start: dict[str, str] = {name: getattr(question, name) for name in texts}
    wrong: list[Diagnostic] = []
    try:
        if question.model and model.in_catalog(question.model) is None:
            path = question.model if Path(question.model).is_absolute() else str(question.base / question.model)
            path = path if Path(path).exists() else question.model
            start |= {"config": json.dumps(model.config(path), indent=1), "model": model.load(path).name}
    except MeshwrightError as error:
        wrong += error.diagnostics
    try:
        if question.on.endswith(".toml"):
            loaded = cluster.load(str(question.base / question.on))
            start |= {"cluster": cluster.to_toml(loaded), "on": ""}
    except MeshwrightError as error:
        wrong += error.diagnostics
    try:
        is_file = question.plan.endswith(".toml")
        if question.plan:
            start["plan"] = parse(str(question.base / question.plan) if is_file else question.plan).text()
    except MeshwrightError as error:
        wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    return {key: text for key, text in start.items() if text}
