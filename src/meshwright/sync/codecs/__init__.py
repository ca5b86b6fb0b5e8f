"""Codecs: what values are on the wire, with the exact number of bytes and a reference in numpy.

One file a codec; each registers a :class:`Codec`. ``run/codecs.py`` has faster versions on tensors of some of them; any
other is run as it stands here, through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import MeshwrightError, nearest

if TYPE_CHECKING:
    import numpy as np

MODULES = [
    "meshwright.sync.codecs.stored",
    "meshwright.sync.codecs.bf16",
    "meshwright.sync.codecs.int8",
    "meshwright.sync.codecs.sigma8",
    "meshwright.sync.codecs.fp4",
]
"""The files that define codecs, each as ``CODECS``: a new codec is a file and its name here."""


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """A code for numbers by name.

    ``encode`` turns values [n] into uint8 [wire_bytes(n, element_bytes)], ``decode`` (bytes, n, type) back into values
    [n]; ``element_bytes`` is the size of a stored value. ``moved`` (n, element_bytes) gives the bytes of device memory
    that encoding and that decoding read and write. ``summed`` is the type in which encoded values may be added on their
    way ("stored": the values' own), so that an all-reduce carries them; "" where they may not, so that every rank
    gathers all. ``exact``: decoding gives back what was encoded.
    """

    name: str
    title: str
    paper: str
    exact: bool
    summed: str
    wire_bytes: Callable[[int, int], int]
    moved: Callable[[int, int], tuple[int, int]]
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray, int, np.dtype], np.ndarray]


@cache
def codecs() -> dict[str, Codec]:
    """Every codec by its name."""
    found = [import_module(module).CODECS for module in MODULES]
    return {codec.name: codec for group in found for codec in group}


def codec(name: str) -> Codec:
    """The codec called `name`.

    Raises:
        MeshwrightError: Y001 when none has the name; names the nearest.
    """
    known = codecs()
    if name not in known:
        raise MeshwrightError.one("Y001", f"no codec is called {name!r}", help=nearest(name, list(known)))
    return known[name]
