"""The model of a question: read from a Hugging Face ``config.json`` or the catalog, or built from dimensions.

load("llama3-70b")                      a name of the catalog, or a path to a config.json
from_config({...}, name="mine")         a configuration already parsed
transformer(layers=24, hidden=2048, ...)  dimensions from a paper or a table of measurements
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import catalog
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec import families
from meshwright.spec.architecture import Model
from meshwright.spec.dimensions import transformer
from meshwright.spec.layers import Attention, Block, BlockParams, Dense, Moe

__all__ = ["Attention", "Block", "BlockParams", "Dense", "Model", "Moe", "from_config", "load", "transformer"]


def load(name_or_path: str | Path, **overrides: Any) -> Model:
    """The model of a catalog name (case does not matter) or of a path to a ``config.json``.

    `overrides` replace keys of the configuration before it is read (``num_hidden_layers=2``).
    """
    text = str(name_or_path)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        config = _parse(path.read_text(encoding="utf-8"), text)
        stem = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
        return from_config({**config, **overrides}, name=stem, place=text)
    entry = text.lower()
    if entry not in catalog.names("models"):
        raise MeshwrightError.one("M006", f"no model {text!r}", help=nearest(text, catalog.names("models")))
    file = catalog.folder("models").joinpath(f"{entry}.json")
    config = _parse(file.read_text(encoding="utf-8"), file.name)
    return from_config({**config, **overrides}, name=entry, place=f"catalog/models/{file.name}")


def from_config(config: Mapping[str, Any], name: str = "model", place: str = "config") -> Model:
    """The model of a parsed configuration."""
    return families.read(config, name=name, place=place)


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise MeshwrightError(Diagnostic(code="M007", message=f"not JSON: {error}", place=place)) from None
