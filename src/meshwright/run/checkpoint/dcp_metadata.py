"""The ``.metadata`` of torch's distributed checkpoints, read without running anything that is in it.

That file is pickled, and a pickle may name any function of any module, to be called as it is read. Here those few
classes that torch's own writer names are known, and every other name is refused before anything of it is looked up.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as said
from torch.distributed.checkpoint.filesystem import _StorageInfo

from meshwright.errors import MeshwrightError

METADATA = ".metadata"
#: Bytes of a metadata file that are read: a block of a tensor takes some 200.
MOST_BYTES = 1 << 30
_TYPES = [getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]


class _Named:
    """The value that torch stands for a layout with: nothing here depends on it."""

    def __init__(self, *_: Any):
        pass


#: What torch's writer names, by module and name, and what is made of it.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{("torch", str(one).removeprefix("torch.")): one for one in _TYPES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _Named,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        ("pathlib", name): pathlib.PurePath for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
}
for _name in (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
):
    _ALLOWED["torch.distributed.checkpoint.metadata", _name] = getattr(said, _name)


class StoredBlock(NamedTuple):
    """A block of a tensor: where it begins in the whole, its size, and its bytes in a file of the folder."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor of a distributed checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredBlock, ...]


def is_distributed(path: str | Path) -> bool:
    """Whether a path is the folder of a checkpoint that ``torch.distributed.checkpoint`` wrote."""
    return (Path(path) / METADATA).is_file()


def refused(folder: Path, why: str, help: str = "") -> MeshwrightError:
    """H010: a distributed checkpoint that is not read."""
    usual = "write it again with torch.distributed.checkpoint.save, from a state dict of tensors"
    return MeshwrightError.one(
        "H010", f"cannot read torch's distributed checkpoint: {why}", place=str(folder), help=help or usual
    )


class _Unpickler(pickle.Unpickler):
    """A reader of pickles that knows :data:`_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which torch's does not") from None


def read_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of a distributed checkpoint by their keys; what is no tensor is left out.

    Raises:
        MeshwrightError: H010 when its metadata cannot be read, names what no such metadata does (nothing of it is run),
            or does not fit itself.
    """
    folder = Path(folder)
    file = folder / METADATA
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise refused(folder, f"its metadata has {size:,} bytes, more than {MOST_BYTES:,}")
        with file.open("rb") as opened:
            found = _Unpickler(opened).load()
    except OSError as error:
        raise refused(folder, error.strerror or str(error)) from None
    except MeshwrightError:
        raise
    except Exception as error:  # a pickle can be wrong in any way
        raise refused(folder, f"{error}" or type(error).__name__) from None
    if not isinstance(found, said.Metadata):
        raise refused(folder, f"its metadata is a {type(found).__name__}")
    try:
        return _tensors(found, folder)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise refused(folder, f"its metadata does not fit itself: {error}") from None


def _tensors(found: said.Metadata, folder: Path) -> dict[str, StoredTensor]:
    places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {}
    for index, info in found.storage_data.items():
        places[index.fqn, tuple(index.offset or ())] = info
    out = {}
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(entry, said.TensorStorageMetadata):
            continue
        shape, chunks = tuple(entry.size), []
        for chunk in entry.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            info = places[key, offset]
            if getattr(info, "transform_descriptors", None):
                raise refused(folder, f"{key} is compressed", "write it again without extensions of the writer")
            if Path(info.relative_path).name != info.relative_path:
                raise refused(folder, f"{key} lies in {info.relative_path!r}, not in a file of the folder")
            chunks.append(StoredBlock(offset, size, info.relative_path, int(info.offset), int(info.length)))
        if not isinstance(entry.properties.dtype, torch.dtype) or prod(shape) < 0:
            raise ValueError(f"{key} has no type")
        out[str(key)] = StoredTensor(shape, entry.properties.dtype, tuple(chunks))
    return out
