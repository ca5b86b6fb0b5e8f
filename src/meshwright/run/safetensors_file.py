"""Writing a safetensors file tensor by tensor, each checksummed on its way, and reading one in place.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name to type, shape and byte range) and
the tensors' bytes. The library's own writer wants all tensors at once; this one never holds more than one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

#: The format's names of the types that training states have.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
DTYPES |= {"U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes handed to the operating system at once.
_WINDOW = 64 << 20


class TensorHeader(NamedTuple):
    """Name, type and shape of a tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Written(NamedTuple):
    """The result of writing a file: its size, the CRC-32 of all bytes before the tensors, and of each tensor's."""

    size_bytes: int
    header_crc32: int
    crc32: tuple[int, ...]


def name_of(dtype: torch.dtype) -> str:
    """The format's name of a type."""
    return _NAMES[dtype]


def write(path: Path, heads: Sequence[TensorHeader], values: Iterable[torch.Tensor], **metadata: str) -> Written:
    """Write a new file that is on the disk when this returns. `values` come in the order of `heads`, one at a time,
    contiguous and in host memory.

    Raises:
        OSError: the file cannot be written, or not all of it.
    """
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for head in heads:
        if head.name in header:
            raise ValueError(f"two tensors are called {head.name}")
        if at % head.dtype.itemsize:
            raise ValueError(f"{head.name} would not be aligned: write the widest types first")
        end = at + head.num_bytes
        header[head.name] = {"dtype": name_of(head.dtype), "shape": head.shape, "data_offsets": (at, end)}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    sums = []
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), front)
        for head, tensor in zip(heads, values, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (head.dtype, head.shape):
                raise ValueError(f"{head.name}: {tensor.dtype} {list(tensor.shape)} is not what was announced")
            data, total = raw(tensor), 0
            for i in range(0, len(data), _WINDOW):
                total = zlib.crc32(data[i : i + _WINDOW], total)
                write_all(file.fileno(), data[i : i + _WINDOW])
            sums.append(total)
        os.fsync(file.fileno())
    return Written(len(front) + at, zlib.crc32(front), tuple(sums))


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in as many calls as it takes.

    Raises:
        OSError: the disk is full, or any other reason of the operating system.
    """
    data = memoryview(data)
    while data:
        data = data[os.write(handle, data) :]


def write_file(path: Path, data: bytes) -> None:
    """Write a new file that is on the disk when this returns.

    Raises:
        OSError: as :func:`write_all`.
    """
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, in place."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def checksum(data: memoryview) -> int:
    """CRC-32 of bytes."""
    return zlib.crc32(data)


def header_checksum(path: Path) -> int:
    """CRC-32 of everything before a file's tensors, as far as the file reaches."""
    with path.open("rb") as file:
        length = file.read(8)
        return zlib.crc32(length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size)))


def sync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
