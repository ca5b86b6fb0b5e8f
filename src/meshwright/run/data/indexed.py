"""Tokens that Megatron-LM's preprocessing has written: ``NAME.bin`` with ids one behind the other, and ``NAME.idx``.

The index begins with ``MMIDIDX`` and two zero bytes, a version (1) and a code of the ids' type, then says how many
sequences and documents there are, the length of every sequence (int32), the byte where each begins (int64), and the
sequence with which every document begins (int64), all little-endian. At a document's end stands what was written there
(``--append-eod``); nothing is added.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
#: The types of ids by their code; floats have codes too, and are no ids.
KINDS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
#: Ids of a file that are looked at together.
BLOCK = 1 << 24
_HEAD = struct.Struct("<9sQBQQ")


class IndexedTokens(NamedTuple):
    """Tokens on disk: the ``file`` they lie in, their numpy type ``kind``, how many, where documents start, and the
    ``digest`` of index and size. ``learnt``: a file with a byte each that says whether a token is learnt; None: all."""

    file: Path
    kind: str
    num_tokens: int
    starts: NDArray[np.int64]
    digest: str
    learnt: Path | None = None

    def largest(self) -> int:
        """The largest id; every id is looked at.

        Raises:
            MeshwrightError: D007 for a negative one.
        """
        tokens, most = np.memmap(self.file, self.kind, "r"), 0
        for begin in range(0, len(tokens), BLOCK):
            part = tokens[begin : begin + BLOCK]
            if int(part.min()) < 0:
                at = begin + int(np.argmax(part < 0))
                raise _bad(self.file, f"id {int(tokens[at])} at place {at:,} is negative")
            most = max(most, int(part.max()))
        return most


def pair(name: str) -> tuple[Path, Path] | None:
    """The ``.bin`` and ``.idx`` that a name means: of either, or of both without their ending; None where it means no
    such pair."""
    path = Path(name)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    both = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    if path.suffix in (".bin", ".idx") or (not path.exists() and all(one.is_file() for one in both)):
        return both
    return None


def look(tokens: Path, index: Path) -> None:
    """Look whether both files are there.

    Raises:
        MeshwrightError: D001 for one that is not.
    """
    try:
        for file in (index, tokens):
            file.stat()
    except OSError as error:
        raise _absent(error) from None


def read(tokens: Path, index: Path) -> IndexedTokens:
    """The tokens of such a pair of files.

    Raises:
        MeshwrightError: D001 for a file that cannot be read; D007 for an index that is none, or does not describe the
            file beside it.
    """
    try:
        data, size = index.read_bytes(), tokens.stat().st_size
    except OSError as error:
        raise _absent(error) from None
    if len(data) < _HEAD.size or data[:9] != MAGIC:
        raise _bad(index, "it is not an index of Megatron-LM")
    _, version, code, sequences, documents = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _bad(index, f"it is of version {version}, and {VERSION} is read")
    if code not in KINDS:
        raise _bad(index, f"its ids have the type of code {code}, which is none of integers")
    expected = _HEAD.size + 12 * sequences + 8 * documents
    if len(data) < expected:
        raise _bad(
            index,
            f"it has {len(data):,} bytes, and {sequences:,} sequences and {documents:,} documents take {expected:,}",
        )
    lengths, pointers, firsts = _columns(data, sequences, documents)
    width = np.dtype(KINDS[code]).itemsize
    begins = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if len(lengths) and (lengths.min() < 0 or not np.array_equal(pointers, begins[:-1] * width)):
        raise _bad(index, "its sequences do not lie one behind the other")
    if size != begins[-1] * width:
        raise _bad(tokens, f"it has {size:,} bytes, and the index says {int(begins[-1]):,} ids of {width}")
    if len(firsts) and (firsts.min() < 0 or firsts.max() > sequences or (np.diff(firsts) < 0).any()):
        raise _bad(index, "its documents do not begin with sequences in order")
    starts = begins[firsts[firsts < sequences]] if documents else begins[:-1]
    starts = np.unique(np.append(0, starts)) if size else starts[:0]  # an empty document is none
    starts = starts[starts < begins[-1]]
    whole = hashlib.sha256(data)
    whole.update(ends_of(tokens, size))
    return IndexedTokens(tokens.absolute(), KINDS[code], int(begins[-1]), starts, whole.hexdigest())


def _columns(data: bytes, sequences: int, documents: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    at = _HEAD.size
    lengths = np.frombuffer(data, "<i4", sequences, at)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    return lengths, pointers, np.frombuffer(data, "<i8", documents, at + 12 * sequences)


def ends_of(path: Path, size: int) -> bytes:
    """The size of a file with its first and last mebibyte: what tells one from another without reading all of it."""
    part = 1 << 20
    with path.open("rb") as file:
        first = file.read(part)
        file.seek(max(0, size - part))
        return f"{size} ".encode() + first + file.read(part)


def _absent(error: OSError) -> MeshwrightError:
    message = f"cannot read the tokens: {error.strerror}"
    help = "NAME.bin and NAME.idx lie beside each other, as Megatron-LM's tools/preprocess_data.py writes them"
    return MeshwrightError.one("D001", message, place=str(error.filename), help=help)


def _bad(path: Path, why: str) -> MeshwrightError:
    help = "write it with Megatron-LM's tools/preprocess_data.py, or name the text itself"
    return MeshwrightError.one("D007", f"not tokens of Megatron-LM: {why}", place=str(path), help=help)
