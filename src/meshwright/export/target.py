"""Targets: the engines a plan is exported to, each as data with its version, its keys and where they are documented.

``data/NAME.toml`` lists every key that the exporter may write, as the target's own parser of that version reads it;
a test holds exporters to their lists, and the lists to the installed target where it can be installed.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from meshwright.spec.model import Model

FORMAT_VERSION = 1


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that the target brings along: found by its layers, width and exact number of parameters.

    ``max_seq_len`` is the longest sequence it takes (0: any), ``pipeline`` whether it can be split into stages,
    ``context`` whether its attention works on a sequence that is split over ranks.
    """

    module: str
    flavor: str
    layers: int
    hidden: int
    params: int
    max_seq_len: int
    pipeline: bool = True
    context: bool = True


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: ``title`` and ``version`` for headers, ``source`` of the keys, ``keys`` by section, and
    ``comments`` on what each says, for the file."""

    name: str
    title: str
    version: str
    source: str
    keys: dict[str, tuple[str, ...]]
    models: tuple[KnownModel, ...] = ()
    comments: dict[str, str] = {}

    @property
    def label(self) -> str:
        return f"{self.title} {self.version}"

    def find(self, model: Model) -> KnownModel | None:
        """The target's own model with the same layers, width and parameters."""
        wanted = (model.num_layers, model.hidden, model.num_params)
        return next((m for m in self.models if (m.layers, m.hidden, m.params) == wanted), None)


@cache
def load(name: str) -> Target:
    """The target of that name."""
    table = tomllib.loads(files("meshwright.export").joinpath(f"data/{name}.toml").read_text(encoding="utf-8"))
    if table.pop("format_version") != FORMAT_VERSION:
        raise AssertionError(f"{name}.toml is of another format_version")
    return msgspec.convert({"name": name, **table}, Target)
