"""Tokens that datatrove has written for nanotron: ``NAME.ds`` with ids of two or four bytes one behind the other, and
``NAME.ds.index`` with the place at which each document ends (uint64); ``NAME.ds.loss``, if it is there, has a byte for
each id that says whether it is learnt. All is little-endian. At a document's end stands what was written there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.run.data.indexed import IndexedTokens, ends_of

SUFFIX = ".ds"
#: Types of ids by their bytes.
KINDS = {2: "<u2", 4: "<u4"}


def tokens(name: str) -> list[Path]:
    """The files of tokens that a name means: itself, or all in a folder and below, by name; [] where it means
    none."""
    path = Path(name)
    if path.suffix == SUFFIX:
        return [path]
    return sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else []


def read(file: Path) -> IndexedTokens:
    """The tokens of such a file.

    Raises:
        MeshwrightError: D001 for a file that cannot be read; D007 for an index that does not describe it.
    """
    index, mask = Path(f"{file}.index"), Path(f"{file}.loss")
    try:
        data, size = index.read_bytes(), file.stat().st_size
        learnt = mask if mask.is_file() else None
    except OSError as error:
        help = "NAME.ds and NAME.ds.index lie beside each other, as datatrove's DocumentTokenizer writes them"
        raise MeshwrightError.one(
            "D001", f"cannot read the tokens: {error.strerror}", place=str(error.filename), help=help
        ) from None
    if len(data) % 8:
        raise _bad(index, f"it has {len(data):,} bytes, which are no whole numbers of 8")
    ends = np.frombuffer(data, "<u8").astype(np.int64)
    if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any()):
        raise _bad(index, "its documents do not lie one behind the other")
    count = int(ends[-1]) if len(ends) else 0
    kind = next((kind for width, kind in KINDS.items() if count * width == size), "")
    if not kind:
        raise _bad(file, f"it has {size:,} bytes, and the index says {count:,} ids of two or four")
    if learnt is not None and learnt.stat().st_size != count:
        raise _bad(learnt, f"it has {learnt.stat().st_size:,} bytes, and there are {count:,} ids")
    starts = np.unique(np.append(0, ends[:-1])) if count else ends[:0]  # an empty document is none
    whole = hashlib.sha256(data)
    whole.update(ends_of(file, size))
    if learnt is not None:
        whole.update(ends_of(learnt, count))
    return IndexedTokens(file.absolute(), kind, count, starts[starts < count], whole.hexdigest(), learnt)


def _bad(path: Path, why: str) -> MeshwrightError:
    help = "write it with datatrove's DocumentTokenizer, or name the text itself"
    return MeshwrightError.one("D007", f"not tokens of datatrove: {why}", place=str(path), help=help)
