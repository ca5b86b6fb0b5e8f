"""A question: model, cluster, workload and plan as they were said, on the command line or in a .toml file.

A question file says the four in the words of the command line::

    format_version = 1
    model = "llama3-70b"
    on = "64xh100"
    train = "batch=512,seq=8192"
    plan = "tp8 pp4 vpp5 zero1"

or the first three, and the plan as the tables of a plan file (:mod:`meshwright.plan.toml`).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest

if TYPE_CHECKING:
    from meshwright.prediction import Prediction

FORMAT_VERSION = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The four texts, and a framework profile if one is named; ``base`` is the folder that paths in them are
    relative to."""

    model: str = ""
    on: str = ""
    train: str = ""
    plan: str = ""
    framework: str = ""
    base: Path = Path()


#: What a question file may say besides.
OPTIONAL = ("framework",)
#: Field -> how it is written on the command line, for what is missing.
WANTED = {
    "model": "MODEL, a catalog name or a config.json (meshwright catalog models)",
    "on": "--on CLUSTER, such as 64xh100 (meshwright catalog clusters)",
    "train": "--train batch=512,seq=8192",
    "plan": '--plan "tp8 pp4 vpp5 zero1"',
}


def load(path: str) -> Question:
    """The question in a .toml file.

    Raises:
        MeshwrightError: X006 unreadable, X007 another format version, X008 for every key that is wrong.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path) from None
    check_version(table.pop("format_version", None), path)
    tables = [key for key, value in table.items() if isinstance(value, dict)]
    if tables and "plan" not in table:  # the file is a plan file too, and says what is wrong with it as one
        table = {key: value for key, value in table.items() if key not in tables} | {"plan": Path(path).name}
    wrong = [
        _wrong(key, value, path)
        for key, value in table.items()
        if key not in (*WANTED, *OPTIONAL) or not _is_text(value)
    ]
    if wrong:
        raise MeshwrightError(wrong)
    return Question(**table, base=Path(path).parent)


def asked(said: Mapping[str, str]) -> Question:
    """The question of a command's options: where the model is a .toml file, what that says with the others put over it.

    Raises:
        MeshwrightError: as :func:`load`.
    """
    if not said["model"].endswith(".toml"):
        return Question(**said)
    over = {field: _from_here(text) for field, text in said.items() if field != "model" and text}
    return msgspec.structs.replace(load(said["model"]), **over)


def _from_here(text: str) -> str:
    """A path given as an option is relative to the working folder, not to the question file."""
    return str(Path(text).resolve()) if text.endswith((".json", ".toml")) else text


def beside(text: str, path: str) -> str:
    """How a file at `path` says `text`, which may name a file or a folder: relative to where it lies."""
    if "/" in text and Path(text).is_dir():
        text += "/config.json"
    if not text.endswith((".json", ".toml")) or Path(text).is_absolute():
        return text
    return os.path.relpath(text, Path(path).resolve().parent)


def check_version(version: Any, path: str, convert: str = "") -> None:
    """X007 unless `version` is the one this code reads; `convert` says how else to get there."""
    if version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    upgrade = "it was written by a newer version: pip install --upgrade meshwright"
    add = f"write format_version = {FORMAT_VERSION} at the top of the file"
    raise MeshwrightError.one(
        "X007",
        f"format_version is {version!r}, this version reads {FORMAT_VERSION}",
        place=path,
        help=convert or (upgrade if newer else add),
    )


def read_all(questions: list[Question], *, also_wrong: Iterable[Diagnostic] = ()) -> list[Callable[[], Prediction]]:
    """One function per question that answers it. Everything that is wrong in any of them, and `also_wrong`, is
    raised at once; nothing is predicted before all can be."""
    wrong, ready, before = list(also_wrong), [], set()
    for question in questions:
        parts, found = read_parts(question)
        wrong += [d for d in found if d not in before]  # what two questions share is wrong once
        before.update(found)
        ready.append((parts, question.framework))
    if wrong:
        raise MeshwrightError(wrong)
    return [_later(parts, framework) for parts, framework in ready]


def _later(parts: list[Any], framework: str) -> Callable[[], Prediction]:
    def answer() -> Prediction:
        from meshwright.cost import standard_on
        from meshwright.predict import predict

        return predict(*parts, costs=standard_on(parts[1], framework))

    return answer


def read_parts(question: Question) -> tuple[list[Any], list[Diagnostic]]:
    """Model, cluster, train and plan as far as they could be read, and what was wrong with the others."""
    from meshwright.plan import parse as read_plan
    from meshwright.spec.cluster import load as read_cluster
    from meshwright.spec.model import load as read_model
    from meshwright.spec.workload import parse as read_train

    readers = {"model": read_model, "on": read_cluster, "train": read_train, "plan": read_plan}
    parts, wrong = [], []
    for field, reader in readers.items():
        text = getattr(question, field)
        if not text:  # reported as missing by the command
            continue
        try:
            parts.append(reader(_path(text, question.base)))
        except MeshwrightError as error:
            wrong += error.diagnostics
    if question.framework:
        from meshwright.cost.framework import load as read_framework

        try:
            read_framework(question.framework)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return parts, wrong


def _path(text: str, base: Path) -> str:
    """Files named in a question file lie beside it."""
    if text.endswith((".json", ".toml")) and not Path(text).is_absolute():
        return str(base / text)
    return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _wrong(key: str, value: Any, path: str) -> Diagnostic:
    known = ["format_version", *WANTED, *OPTIONAL]
    if key not in known:
        return Diagnostic(code="X008", message=f"unknown key {key!r}", place=path, help=nearest(key, known))
    return Diagnostic(
        code="X008", message=f"{key} = {value!r} is not a text", place=path, help=f'write {key} = "..." in quotes'
    )
