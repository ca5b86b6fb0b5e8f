"""Models of one kind that are a small JSON file each: those of the catalog by name, and a user's own by path."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshwright import catalog
from meshwright.errors import MeshwrightError, nearest

#: Why a file is none.
_UNREADABLE = (OSError, ValueError, RecursionError, RuntimeError)


class ModelKind(NamedTuple):
    """A kind of models: their ``noun``, the catalog's ``folder`` of them, ``architectures`` that their files name, the
    ``code`` of what is wrong with one, and the function that makes a model of a parsed file (``read``)."""

    noun: str
    folder: str
    architectures: Collection[str]
    code: str
    read: Callable[..., Any]


class CatalogModels:
    """The models of a kind."""

    def __init__(self, kind: ModelKind):
        self.kind = kind

    @cached_property
    def names(self) -> dict[str, str]:
        """Every name and alias in small letters -> the entry that it means."""
        found = {name: name for name in catalog.names(self.kind.folder)}
        return found | {alias: name for name in found for alias in self._entry(name).get("_aliases", ())}

    def named(self, text: str) -> bool:
        """Whether a text names a model of the catalog, or a JSON file of one."""
        if text.lower() in self.names:
            return True
        if not text.endswith(".json"):
            return False
        try:
            found = _parsed(text)
        except _UNREADABLE:
            return False
        return isinstance(found, dict) and found.get("architectures") in ([one] for one in self.kind.architectures)

    def load(self, text: str) -> Any:
        """Return the model of a catalog name or alias, or of the path of a JSON file.

        Raises:
            MeshwrightError: the kind's code for a name that is none, an unreadable file, and everything wrong in one.
        """
        name = self.names.get(text.lower())
        if name is not None:
            return self.kind.read(self._entry(name), name=name, place=f"catalog/{self.kind.folder}/{name}.json")
        try:
            found = _parsed(text)
        except _UNREADABLE as error:
            reason = getattr(error, "strerror", None) or str(error)[:120]
            help = f"{nearest(text[:80], list(self.names))}, or the path of a JSON file"
            message = f"no {self.kind.noun} {text[:80]!r}: {reason}"
            raise MeshwrightError.one(self.kind.code, message, place=f"model {text[:80]}", help=help) from None
        return self.kind.read(found, name=Path(text).stem, place=text)

    def _entry(self, name: str) -> dict[str, Any]:
        return json.loads(catalog.folder(self.kind.folder).joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _parsed(path: str) -> Any:
    return json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
