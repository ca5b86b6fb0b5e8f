"""Edges of a graph from a file.

A file is ``.npz`` (an array ``edges`` [E, 2], or ``heads`` and ``tails`` [E]), ``.parquet`` (its first two columns), or
text with two whole numbers a line, between spaces, tabs or commas; ``#`` begins a comment. Nodes are numbered from 0.
Where edges have relations, their numbers are a third column, or ``relations`` [E].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError


class Edges(NamedTuple):
    """Ends of edges [E] each, by the numbers of their nodes, and their relations, where they have some."""

    heads: NDArray[np.int64]
    tails: NDArray[np.int64]
    relations: NDArray[np.int64] | None = None


#: What reading an array of a file may raise.
UNREADABLE = (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile)


def why_unreadable(error: Exception) -> str:
    """Return why a file has no arrays, in one line."""
    if isinstance(error, EOFError):
        return "it is empty or ends too soon"
    said = getattr(error, "strerror", None) or str(error).splitlines()[0][:120]
    return "it is no .npz file, or one of Python's own objects" if "pickle" in said else said


@contextmanager
def arrays(path: Path) -> Iterator[Mapping[str, NDArray]]:
    """The arrays of an ``.npz`` file by name; raises one of `UNREADABLE` where there are none."""
    with path.open("rb") as raw:
        found = np.load(raw, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise ValueError("it is one array without a name, and no .npz file")
        with found:
            yield found


def _bad(message: str, path: str, help: str) -> MeshwrightError:
    return MeshwrightError.one("D010", message, place=path, help=help)


def read_edges(path: str, nodes: int, relations: int = 0) -> Edges:
    """Return the edges of a file between so many nodes, of so many relations (0: none are read).

    Raises:
        MeshwrightError: D010 for a file that cannot be read, that has other columns, or other nodes.
    """
    wanted = "two whole numbers a line, an .npz with edges [E, 2], or a .parquet with two columns"
    try:
        found = np.asarray(_columns(Path(path).expanduser(), 3 if relations else 2))
    except ImportError:
        raise _bad(
            "a .parquet file is read with pyarrow, which is not installed", path, "pip install pyarrow"
        ) from None
    except UNREADABLE as error:
        raise _bad(f"edges cannot be read: {why_unreadable(error)}", path, f"name a file of {wanted}") from None
    if found.ndim != 2 or found.shape[1] < 2 or not len(found) or found.dtype.kind not in "iu":
        raise _bad(f"no edges: an array of {found.dtype} {list(found.shape)}", path, f"name a file of {wanted}")
    heads, tails = (np.ascontiguousarray(found[:, column], np.int64) for column in (0, 1))
    low, high = int(min(heads.min(), tails.min())), int(max(heads.max(), tails.max()))
    if low < 0 or high >= nodes:
        message = f"node {low if low < 0 else high} of a model of {nodes:,} nodes, which are numbered from 0"
        more = f", and say nodes = {high + 1} in the model" if high >= nodes else ""
        raise _bad(message, path, f"number nodes from 0{more}")
    if not relations:
        return Edges(heads, tails)
    if found.shape[1] < 3:
        raise _bad("edges have no relations, which the model has", path, "a third column says which each edge is of")
    kinds = np.ascontiguousarray(found[:, 2], np.int64)
    if kinds.min() < 0 or kinds.max() >= relations:
        message = f"relations from {kinds.min()} to {kinds.max()} of {relations:,}, which are numbered from 0"
        raise _bad(message, path, f"say relations = {max(kinds.max() + 1, 1)} in the model")
    return Edges(heads, tails, kinds)


def _columns(path: Path, count: int) -> NDArray:
    """The columns of a file [E, 2 or more], of which so many are wanted."""
    if path.suffix == ".npz":
        with arrays(path) as file:
            names = [name for name in ("heads", "tails", "relations")[:count] if name in file]
            return file["edges"] if "edges" in file else np.stack([file[name] for name in names], axis=1)
    if path.suffix == ".parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            table = read_table(path)
            return np.stack([table.column(i).to_numpy() for i in range(count)], axis=1)
        except ArrowException as error:
            raise ValueError(str(error)) from None
    with path.open(encoding="utf-8-sig") as file:
        begin = file.readline()
    if not begin:
        raise ValueError("the file is empty")
    comma = "," if "," in begin else None
    return np.loadtxt(
        path, dtype=np.int64, delimiter=comma, comments="#", ndmin=2, usecols=range(count), encoding="utf-8-sig"
    )
