"""The model of a question: read from a Hugging Face ``config.json`` or the catalog, or built from dimensions.

    load("llama3-70b")                        a name of the catalog, or a path to a config.json
    from_config({...}, name="mine")           a configuration already parsed
    transformer(layers=24, hidden=2048, ...)  dimensions from a paper or a table of measurements

The catalog's entries are configurations in the same words, each with its source and further names for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright import catalog
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec import families, model_names
from meshwright.spec.architecture import Model
from meshwright.spec.dimensions import transformer
from meshwright.spec.graphs import is_graph_model
from meshwright.spec.layers import Attention, Block, BlockParams, Dense, Moe
from meshwright.spec.recommender import is_recommender

__all__ = ["Attention", "Block", "BlockParams", "Dense", "Model", "Moe", "config", "from_config", "load", "transformer"]

_CATALOG = "catalog/models/"
#: Words that make another model of one, and the keys of its configuration that they set. ``shortcut``: routed experts
#: read what entered their block, before its attention (ScMoE, 2404.05019). ``kraken4``: blocks of four parts with
#: streams of their own, as wide as leaves the model about as many parameters (Kraken, 2408.07802).
MODEL_WORDS: dict[str, dict[str, Any]] = {"shortcut": {"moe_shortcut": True}} | {
    f"kraken{ways}": {"parallel_ways": ways} for ways in (2, 4, 8)
}


def load(name_or_path: str | Path, **overrides: Any) -> Model:
    """The model of a catalog name, or of a path to a ``config.json`` or the folder that holds one.

    Names are those of the catalog, their aliases (``llama3-405b``) and Hugging Face ids; case does not matter. The name
    of a checkpoint that was trained further or stored otherwise means its model (:mod:`~meshwright.spec.model_names`),
    with a note that says so. Words
    behind a comma make another model of it (:data:`MODEL_WORDS`): ``mixtral-8x7b,shortcut``.
    `overrides` replace keys of the configuration before it is read (``num_hidden_layers=2``).

    Raises:
        MeshwrightError: M006 when there is no such model; M007 when the file cannot be read; M008 for an override
            that has no effect; and whatever is wrong with the configuration (M001-M005).
    """
    text, said = str(name_or_path), ()
    if "," in text and not Path(text).exists():
        text, *said = (part.strip() for part in text.split(","))
    unknown = [word for word in said if word not in MODEL_WORDS]
    if unknown:
        help = f"words of a model: {', '.join(MODEL_WORDS)}"
        raise MeshwrightError.one(
            "M006", f"no word {', '.join(unknown)!r} of a model", place=str(name_or_path), help=help
        )
    for word in said:
        overrides = MODEL_WORDS[word] | overrides
    found, name, place = _found(text if said else name_or_path)
    model = _overridden(found, overrides, name=",".join((name, *said)), place=place)
    if not place.startswith(_CATALOG) or _named(text) is not None:
        return model
    told = model_names.note(text, model_names.parts(text)[1])
    return msgspec.structs.replace(model, notes=(*model.notes, told))


def config(name_or_path: str | Path) -> dict[str, Any]:
    """The configuration that :func:`load` reads, as it is published.

    Raises:
        MeshwrightError: M006 when there is no such model; M007 when the file cannot be read.
    """
    found, _, _ = _found(name_or_path)
    return published(found)


def published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the notes of whoever wrote it, whose keys begin with an underscore; that key by
    which diffusers says what it is of stays."""
    return {key: value for key, value in config.items() if key == families.CLASS or not key.startswith("_")}


def read_from(name_or_path: str | Path) -> Path | None:
    """Return the file that :func:`load` reads for a path; None for a name of the catalog, and without a file."""
    text = str(name_or_path)
    is_path = "/" in text or text.endswith(".json") or isinstance(name_or_path, Path)
    return _file(text) if is_path or _entry(text) is None else None


def _found(name_or_path: str | Path) -> tuple[dict[str, Any], str, str]:
    """A configuration, the model's name and where it was found."""
    text = str(name_or_path)
    entry, file = _entry(text), read_from(name_or_path)
    if file is not None:
        name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
        return _read_file(file), name, str(file)
    if entry is not None:
        return _entry_config(entry), entry, f"{_CATALOG}{entry}.json"
    if text.endswith(".json"):
        raise MeshwrightError.one("M007", f"no file {text!r}", help="give the path of a config.json, or a catalog name")
    if text and _is_folder(text):
        raise MeshwrightError.one("M007", f"no config.json in the folder {text!r}", help="give the folder of a model")
    if is_recommender(text):
        message = f"{text[:80]} is a recommendation model, whose tables have no layers that this asks about"
        help = f"meshwright predict or search {text[:80]} --on 8xh100 --train batch=65536"
        raise MeshwrightError.one("M010", message, place=f"model {text[:80]}", help=help)
    if is_graph_model(text):
        message = f"{text[:80]} is a model of a graph, which has no layers over sequences that this asks about"
        help = f"meshwright predict {text[:80]} --on 4xp100 --train ...: meshwright explain graph_model"
        raise MeshwrightError.one("M011", message, place=f"model {text[:80]}", help=help)
    raise MeshwrightError.one(
        "M006", f"no model {text[:80]!r} in the catalog, and no such file", help=_names_like(text)
    )


def in_catalog(name: str) -> Model | None:
    """The catalog's model of a name or alias, None when it has no such; no file beside the catalog is looked at."""
    entry = _entry(name)
    return None if entry is None else from_config(_entry_config(entry), name=entry, place=f"{_CATALOG}{entry}.json")


def known_names() -> list[str]:
    """Every name and alias of the catalog's models."""
    return [*catalog.names("models"), *_aliases()]


def from_config(config: Mapping[str, Any], name: str = "model", place: str = "config") -> Model:
    """The model of a parsed ``config.json``; `name` and `place` appear in its errors.

    Raises:
        MeshwrightError: M001-M003 with every fault, M004 for an unknown architecture, M005 for one that is known and
            not modelled, M007 when `config` is not an object.
    """
    if not isinstance(config, Mapping):
        raise MeshwrightError.one("M007", f"a configuration is an object, not a {type(config).__name__}", place=place)
    return families.read(config, name=name, place=place)


def _overridden(config: dict[str, Any], overrides: dict[str, Any], *, name: str, place: str) -> Model:
    nested = families.nested_key(config)
    changed = {**config, **overrides} if nested is None else {**config, nested: {**config[nested], **overrides}}
    model = from_config(changed, name=name, place=place)
    idle = [key for key in overrides if key in model.unknown_fields]
    if idle:
        keys = list(config if nested is None else config[nested])
        raise MeshwrightError(
            Diagnostic(
                code="M008",
                message=f"override {key!r} has no effect on {name}: the {model.family} family does not read it",
                place=f"{key} = {overrides[key]!r:.40}",
                help=nearest(key, [k for k in keys if not k.startswith("_")]),
            )
            for key in idle
        )
    return model


@cache
def _entry_config(entry: str) -> dict[str, Any]:
    return json.loads(catalog.folder("models").joinpath(f"{entry}.json").read_text(encoding="utf-8"))


@cache
def _aliases() -> dict[str, str]:
    """Every further name of a catalog model, in lower case, with the entry that it means."""
    return {alias: entry for entry in catalog.names("models") for alias in _entry_config(entry).get("_aliases", ())}


def _entry(text: str) -> str | None:
    """The catalog entry that a name, an alias or the name of a checkpoint means."""
    return _named(text) or _meanings().get(model_names.parts(text)[0])


def _named(text: str) -> str | None:
    """The catalog entry that a name or alias means."""
    name = text.lower()
    return name if name in catalog.names("models") else _aliases().get(name)


@cache
def _meanings() -> Mapping[str, str]:
    """The entry of every model that :func:`known_names` tell from the others."""
    return model_names.meanings([*((name, name) for name in catalog.names("models")), *_aliases().items()])


def _names_like(text: str) -> str:
    names = catalog.names("models")
    hint = nearest(text[:80], [*names, *_aliases()])
    return hint if hint.startswith("did you mean") else nearest(text[:80], names) + " (`meshwright catalog` lists all)"


def _file(text: str) -> Path | None:
    """The configuration file that a path means; None when there is none."""
    try:
        path = Path(text).expanduser()
        path = path / "config.json" if text and path.is_dir() else path
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name too long, with a null byte, or of an unknown user
        return None


def _is_folder(text: str) -> bool:
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):
        return False


def _read_file(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        help = "a config.json in UTF-8 is expected"
        if isinstance(error, json.JSONDecodeError):
            empty = not file.stat().st_size
            reason = "it is empty" if empty else f"not JSON: {reason}"
            help = help if empty else f"mend line {error.lineno} of the file"
        raise MeshwrightError.one("M007", f"cannot read {file.name}: {reason}", place=str(file), help=help) from None
    if not isinstance(config, dict):
        raise MeshwrightError.one(
            "M007", f"{file.name} holds a {type(config).__name__}, not an object", place=str(file)
        )
    return config
