"""Placements of a user's own: a TOML file that says where a few tensors of a model lie on the axes of a mesh.

    [mesh]                      # axes, the outermost first
    dp = 2
    tp = 4

    [weights]
    "mlp.up" = ["dp:B", "tp:S(1)"]

    [activations]
    hidden = ["dp:S(0)"]        # on axes that it does not name a tensor is left to the completion

``S(1)`` or ``S1`` cuts dim 1, ``B`` (or ``R``) has a copy on every rank, ``P`` a term of a sum to come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.layers.algebra import PARTIAL, REPLICATE, AxisMesh
from meshwright.plan.tensors import PlacedTensor, TensorNetwork
from meshwright.spec.toml_text import loaded

_TAG = re.compile(r"S\(?(\d+)\)?|[BRP]", re.IGNORECASE)
TABLES = ("mesh", "weights", "activations")


class Annotations(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh of a file, and what it says of tensors: name -> axis -> placement."""

    mesh: AxisMesh
    said: dict[str, dict[str, int]]


def load(path: str | Path, known: TensorNetwork, num_ranks: int) -> Annotations:
    """Read a file of placements for a model on so many ranks.

    Raises:
        MeshwrightError: A002 for everything that is wrong with it, all at once: a file that cannot be read, an unknown
            table, tensor or axis, a word that is no placement, a tensor with two placements on one axis, a dim that it
            has not or that is cut finer than it is long, a weight that is a partial sum, a mesh of another size.
    """
    _, table = loaded(path, "A002", "give a TOML file with [mesh] and [weights]: meshwright explain placements")
    return read(table, known, num_ranks, str(path))


def read(table: Mapping[str, Any], known: TensorNetwork, num_ranks: int, path: str = "placements") -> Annotations:
    """The annotations of a table; `path` says where it is from.

    Raises:
        MeshwrightError: A002, as :func:`load` says.
    """
    wrong: list[Diagnostic] = []

    def refuse(where: str, message: str, help: str) -> None:
        wrong.append(Diagnostic(code="A002", message=message, place=f"{path}: {where}", help=help))

    for name in table:
        if name not in TABLES:
            refuse(f"[{name}]", f"unknown table {name!r}", nearest(name, list(TABLES)))
    axes = _axes(table.get("mesh"), num_ranks, refuse)
    said: dict[str, dict[str, int]] = {}
    for kind in ("weights", "activations"):
        rows = table.get(kind, {})
        if not isinstance(rows, Mapping):
            refuse(
                f"[{kind}]", f"{kind} = {rows!r} is no table of tensors", f'say [{kind}], then "mlp.up" = ["tp:S(1)"]'
            )
            continue
        tensors = {n: t for n, t in known.tensors.items() if t.weight == (kind == "weights") and not n.endswith("'")}
        tensors.pop("loss", None)
        for name, words in _flat(rows):
            tensor = tensors.get(name)
            if tensor is None:
                refuse(f"{kind}.{name}", f"no tensor {name!r} among the {kind}", nearest(name, list(tensors)))
            elif not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                refuse(f"{kind}.{name}", f"{words!r} is no list of placements", 'say such as ["dp:B", "tp:S(1)"]')
            else:
                found = _placed(f"{kind}.{name}", tensor, words, axes, refuse)
                if found:
                    said[name] = found
    if wrong:
        raise MeshwrightError(wrong)
    return Annotations(mesh=AxisMesh.of(**axes), said=said)


def _flat(rows: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a table by their whole names: ``mlp.up`` without quotes is a table in a table."""
    for name, value in rows.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _axes(said: Any, num_ranks: int, refuse) -> dict[str, int]:
    """The axes of a mesh with their sizes."""
    if not isinstance(said, Mapping) or not said:
        refuse("[mesh]", "it has no mesh", f"say [mesh], then the axes, the outermost first: dp = {num_ranks}")
        return {}
    sizes, fine = {}, True
    for axis, size in said.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            refuse(f"mesh.{axis}", f"{axis} = {size!r} is no whole number of 1 and more", f"say {axis} = {num_ranks}")
            fine, size = False, 1
        sizes[axis] = size
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if fine and ranks != num_ranks:
        product = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
        refuse("[mesh]", f"the mesh has {product} = {ranks} ranks, and the cluster {num_ranks}", "let the sizes agree")
    return sizes


def _placed(where: str, tensor: PlacedTensor, words: list[str], axes: Mapping[str, int], refuse) -> dict[str, int]:
    """The placements that a tensor's words say, by axis."""
    found: dict[str, int] = {}
    ways = dict.fromkeys(range(len(tensor.shape)), 1)
    for word in words:
        axis, _, tag = word.partition(":")
        read = _TAG.fullmatch(tag)
        if axis not in axes:
            refuse(where, f"{word!r} is of no axis of the mesh", nearest(axis, list(axes)) if axes else "say [mesh]")
            continue
        if read is None:
            refuse(where, f"{word!r} is no placement", f"say {axis}:S(0), {axis}:B or {axis}:P")
            continue
        place = int(read[1]) if read[1] else {"P": PARTIAL}.get(tag.upper(), REPLICATE)
        if axis in found and found[axis] != place:
            refuse(where, f"{word!r} contradicts what is said of {axis} before it", "leave one of both out")
        elif place >= len(tensor.shape):
            dims = ", ".join(f"S({d}) of {n}" for d, n in enumerate(tensor.shape))
            refuse(where, f"{word!r} cuts a dim that {tensor.name} has not", f"its dims: {dims}")
        elif place == PARTIAL and tensor.weight:
            refuse(where, f"{word!r}: a weight is no sum that is still to be taken", f"say {axis}:S(0) or {axis}:B")
        elif place >= 0 and tensor.shape[place] < ways[place] * axes[axis]:
            many = ways[place] * axes[axis]
            refuse(where, f"{word!r} cuts {tensor.shape[place]} places into {many}", "leave some axis out, or say B")
        else:
            ways[place] = ways.get(place, 1) * axes[axis]
            found[axis] = place
    return found
