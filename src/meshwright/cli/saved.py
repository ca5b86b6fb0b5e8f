"""Saved predictions: what ``meshwright predict --json`` wrote, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.cli.question import check_version
from meshwright.errors import MeshwrightError

#: What a comparison needs of a saved prediction.
NEEDED = (
    "model",
    "cluster",
    "workload",
    "plan",
    "fits",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "bubble",
    "attribution",
    "memory",
)


def load(path: str) -> dict[str, Any]:
    """The prediction in a .json file, as plain values.

    Raises:
        MeshwrightError: X006 unreadable, X007 of another format version, with the command that asks its question
            again, X009 not a prediction.
    """
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        help = "two files, or MODEL with --on, --train and --plan: meshwright diff --help"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path, help=help) from None
    if not isinstance(saved, dict):
        raise MeshwrightError.one("X009", f"{path} is not a saved prediction: not a JSON object", place=path)
    check_version(saved.get("format_version"), path, convert=_again(saved, path))
    missing = [key for key in NEEDED if key not in saved]
    if missing:
        said = "it lists errors" if "errors" in saved else f"it lacks {', '.join(missing)}"
        help = "save one: meshwright predict MODEL --on ... --train ... --plan ... --json > a.json"
        raise MeshwrightError.one("X009", f"{path} is not a saved prediction: {said}", place=path, help=help)
    return saved


def _again(saved: dict[str, Any], path: str) -> str:
    """How a prediction of another format is converted: its question, asked of this version."""
    said = [saved.get(key) for key in ("model", "cluster", "workload", "plan")]
    if not all(isinstance(text, str) for text in said):
        return ""
    model, cluster, workload, plan = said
    return f'convert it: meshwright predict {model} --on {cluster} --train {workload} --plan "{plan}" --json > {path}'
