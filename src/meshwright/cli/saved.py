"""Saved predictions: what ``meshwright predict --json`` wrote, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from meshwright.cli.question import check_version
from meshwright.errors import MeshwrightError

Figure = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


class SavedRank(msgspec.Struct):
    """Memory of a rank class that a comparison needs: bytes."""

    capacity_bytes: Figure
    peak_bytes: Figure
    alive: dict[str, Figure]


class Needed(msgspec.Struct):
    """Fields of a saved prediction that a comparison needs; times in seconds."""

    model: str
    cluster: str
    workload: str
    plan: str
    fits: bool
    step_time_s: Annotated[float, msgspec.Meta(gt=0, le=1e30)]
    tokens_per_s_per_gpu: Figure
    mfu: Figure
    bubble: Figure
    attribution: dict[str, Figure]
    memory: Annotated[list[SavedRank], msgspec.Meta(min_length=1)]


def load(path: str) -> dict[str, Any]:
    """The prediction in a .json file, as plain values.

    Raises:
        MeshwrightError: X006 unreadable, X007 of another format version, with the command that asks its question
            again, X009 not a prediction.
    """
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        help = "two files, or MODEL with --on, --train and --plan: meshwright diff --help"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path, help=help) from None
    if not isinstance(saved, dict):
        raise MeshwrightError.one("X009", f"{path} is not a saved prediction: not a JSON object", place=path)
    check_version(saved.get("format_version"), path, convert=_again(saved, path))
    missing = [key for key in Needed.__struct_fields__ if key not in saved]
    said = "it lists errors" if "errors" in saved else f"it lacks {', '.join(missing)}"
    if not missing:
        try:
            msgspec.convert(saved, Needed)
            return saved
        except msgspec.ValidationError as error:
            said = f"it is damaged, or was changed: {error}"
    help = "save one: meshwright predict MODEL --on ... --train ... --plan ... --json > a.json"
    raise MeshwrightError.one("X009", f"{path} is not a saved prediction: {said}", place=path, help=help)


def _again(saved: dict[str, Any], path: str) -> str:
    """How a prediction of another format is converted: its question, asked of this version."""
    said = [saved.get(key) for key in ("model", "cluster", "workload", "plan")]
    if not all(isinstance(text, str) for text in said):
        return ""
    model, cluster, workload, plan = said
    return f'convert it: meshwright predict {model} --on {cluster} --train {workload} --plan "{plan}" --json > {path}'
