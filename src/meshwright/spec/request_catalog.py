"""Recorded traces that come with the package, by name: ``trace=azure-conv``.

An entry of the catalog says in TOML where a trace is from, its licence, how many of the published requests it has and
what was changed, and the names of the published files; beside it lies a file of columns. That is LZMA of one column
after the other, each as 32-bit integers whose lowest bytes come first, then their second ones and so on, which packs
to a third of a gzipped table. A column with a ``+`` behind its name holds differences.

Block hashes are in the columns ``known`` and ``back``: the first ``known`` blocks of a prompt are those of the request
so many rows ``back``, and the others are new, numbered as they come.
"""

from __future__ import annotations

import lzma
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from meshwright import catalog
from meshwright.errors import MeshwrightError, nearest

#: Tokens of a block that a hash of a trace names (Mooncake's).
HASH_BLOCK = 512


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The catalog's word on a trace: ``rows`` of the ``published`` requests (or windows of clients), in ``columns``,
    and ``length_rows`` of ``lengths`` where lengths are apart."""

    name: str
    title: str
    source: str
    licence: str
    rows: int
    published: int
    changes: str
    columns: tuple[str, ...]
    files: tuple[str, ...]
    lengths: tuple[str, ...] = ()
    length_rows: int = 0

    @property
    def label(self) -> str:
        """The name, and how much of the trace it is where it is not all."""
        if self.rows == self.published:
            return self.name
        return f"{self.name} ({self.changes} of {self.published:,})"

    @property
    def said(self) -> str:
        """How a serving workload names it."""
        if "window" in self.columns:
            return f"windows={self.name}"
        return f"lengths={self.name}" if self.rows and "arrival_ms+" not in self.columns else f"trace={self.name}"


def is_name(text: str) -> bool:
    """Return whether a text is meant as the name of a trace: it has no folder and no ending of a file."""
    return not Path(text).suffix and "/" not in text


def entry(name: str) -> TraceEntry:
    """Return what the catalog says of a trace.

    Raises:
        MeshwrightError: W015 where there is none of that name.
    """
    known = catalog.names("traces")
    plain = name.strip().lower().replace("_", "-")
    if plain not in known:
        help = f"{nearest(plain, known)}; or a file: .csv, .jsonl or .json (meshwright catalog traces)"
        raise MeshwrightError.one("W015", f"no trace {name!r} in the catalog", place=f"--serve {name}", help=help)
    table = tomllib.loads(catalog.folder("traces").joinpath(f"{plain}.toml").read_text(encoding="utf-8"))
    return msgspec.convert(table | {"name": plain}, TraceEntry)


def origins(*names: str) -> dict[str, str]:
    """Return where traces of the catalog are from, with their licence, by their label; names of files are left out."""
    entries = [entry(name) for name in names if name and is_name(name)]
    return {one.label: f"{one.source}; {one.licence}" for one in entries}


def published(name: str, data: Path) -> Path:
    """Return the published file of a trace of the catalog in a folder, or below it.

    Raises:
        MeshwrightError: W015 where the folder has none of its files.
    """
    wanted = entry(name).files
    places = [data / file for file in wanted] + [data / "serving_traces" / file for file in wanted]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        message = f"no file of the trace {name} in {data}"
        raise MeshwrightError.one("W015", message, place=f"--serve data={data}", help=f"one of {', '.join(wanted)}")
    return found


@cache
def columns(name: str) -> dict[str, np.ndarray]:
    """Return the columns of a trace of the catalog, int64, by their names; those of its lengths as ``lengths.NAME``.

    Raises:
        MeshwrightError: W015 where the catalog has nothing of it but where it is from.
    """
    one = entry(name)
    if not one.rows:
        help = f"name one of its files, {', '.join(one.files)}, or their folder in data=DIR"
        message = f"nothing of the trace {one.name} comes with the package: {one.source}"
        raise MeshwrightError.one("W015", message, place=f"--serve {name}", help=help)
    heads = [(head, one.rows) for head in one.columns]
    heads += [(f"lengths.{head}", one.length_rows) for head in one.lengths]
    return unpacked(catalog.folder("traces").joinpath(f"{one.name}.xz").read_bytes(), heads)


def unpacked(content: bytes, heads: list[tuple[str, int]]) -> dict[str, np.ndarray]:
    """Return the columns that :func:`packed` made of numbers, given their names and how many rows each has."""
    content, found, at = lzma.decompress(content), {}, 0
    for head, rows in heads:
        planes = np.frombuffer(content, np.uint8, 4 * rows, at).reshape(4, rows)
        values = np.ascontiguousarray(planes.T).view("<u4").ravel().astype(np.int64)
        found[head.removesuffix("+")] = np.cumsum(values) if head.endswith("+") else values
        at += 4 * rows
    return found


def packed(said: dict[str, np.ndarray]) -> bytes:
    """Return columns of numbers from 0 to 2^32 as the file that :func:`unpacked` reads, those with a ``+`` behind their
    name as differences."""
    parts = []
    for head, values in said.items():
        steps = np.diff(values, prepend=0) if head.endswith("+") else np.asarray(values)
        parts.append(steps.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes())
    return lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME)


def hashed(known: np.ndarray, back: np.ndarray, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the block hashes of all prompts one after the other, and where each one's begin [n + 1]."""
    blocks = -(-prompt // HASH_BLOCK)
    ptr = np.concatenate([[0], np.cumsum(blocks)])
    fresh = np.cumsum(blocks - known) - (blocks - known)  # the first new number of each request
    found = np.empty(ptr[-1], np.int64)
    for i, (start, end, new, old) in enumerate(
        zip(ptr[:-1].tolist(), ptr[1:].tolist(), fresh.tolist(), known.tolist())
    ):
        begin = int(ptr[i - back[i]])
        found[start : start + old] = found[begin : begin + old]
        found[start + old : end] = np.arange(new, new + end - start - old)
    return found, ptr


def known_blocks(hashes: np.ndarray, ptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``known`` and ``back`` of every request, of hashes that are numbered as they come.

    Raises:
        ValueError: for others.
    """
    rows = [hashes[a:b].tolist() for a, b in pairwise(ptr)]
    known, back, last, most = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64), {}, -1
    for i, row in enumerate(rows):
        old = next((place for place, one in enumerate(row) if one > most), len(row))
        other = last[row[old - 1]] if old else i
        if row[old:] != list(range(most + 1, most + 1 + len(row) - old)) or rows[other][:old] != row[:old]:
            raise ValueError(f"row {i}: its hashes are not numbered as they come, each prefix as it was before")
        known[i], back[i] = old, i - other
        last |= dict.fromkeys(row, i)
        most += len(row) - old
    return known, back
