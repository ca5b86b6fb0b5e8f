"""Kinds of layers, one file a kind: parameters on a rank, operations, pieces, and state kept of a sequence.

A kind is found by the class of its record. A kind of one's own is a record with ``num_params(hidden)``, a
:class:`~meshwright.layers.kind.Kind` and a call of :func:`register`; then it may stand in any block.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.layers.kind import Kind

MODULES = (
    "attention",
    "mlp",
    "moe",
    "block",
    "embedding",
    "head",
    "boundary",
    "convolution",
    "diffusion",
    "scans",
    "shared",
    "unet",
    "vectors",
)
"""The files of this package that define kinds, each as ``KINDS``: a new kind is a file and its name here."""

_KINDS: dict[type, Kind] = {}


def kinds() -> dict[type, Kind]:
    """Every kind by the class of its record."""
    if not _SHIPPED:
        for module in MODULES:
            for kind in import_module(f"meshwright.layers.{module}").KINDS:
                _SHIPPED[kind.record] = kind
    return _SHIPPED | _KINDS


_SHIPPED: dict[type, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a kind of one's own known, in place of one with the same record; returns it."""
    _KINDS[kind.record] = kind
    return kind


def of(record: Any) -> Kind:
    """The kind of a record.

    Raises:
        MeshwrightError: M009 when no kind has such records.
    """
    found = _KINDS.get(type(record)) or _SHIPPED.get(type(record)) or kinds().get(type(record))
    if found is None:
        names = ", ".join(sorted(kind.name for kind in kinds().values()))
        raise MeshwrightError.one(
            "M009",
            f"no kind of layer has the record {type(record).__name__}",
            place=f"layer {record!r:.60}",
            help=f"register a Kind for it (docs/extending.md); known: {names}",
        )
    return found
