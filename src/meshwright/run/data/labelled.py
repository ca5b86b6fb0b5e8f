"""Labelled samples on disk: images or vectors of features with a class, or a value, each; built once for each content.

``FILE.npz`` has ``labels`` [N] and either ``images``, [N, height, width, channels], [N, channels, height, width] or
[N, height, width] (of videos [N, frames, ...]), or ``features`` [N, width]; it may have ``mean`` and ``std``
[channels], by which images of bytes are normalised once they are between 0 and 1 (0.5 each unless it does),
``clients`` [N], whose sample each is, and ``held_out`` [N], true for those that judge and are never trained on. A
folder of CIFAR's binary files (Krizhevsky 2009) and MNIST's idx files (LeCun et al. 1998), compressed or not, are read
as they are published. Numbers of other types than bytes are taken as they are. A name of the catalog, ``digits``, is
the file that comes with the program.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright import catalog
from meshwright.errors import MeshwrightError

META, INPUTS, LABELS, CLIENTS, HELD = "labelled.json", "inputs.bin", "labels.bin", "clients.bin", "held.bin"
#: Part of a build's key, so that another version builds another.
FORMAT_VERSION = 3
#: Where the two forms of CIFAR lie in a row of bytes: labels first, then red, green and blue of 32 x 32 pixels.
CIFAR_SIDE, CIFAR10_LABELS, CIFAR100_LABELS = 32, 1, 2
#: The beginning of MNIST's files: two zero bytes, bytes as the type, and how many dimensions there are.
IDX_IMAGES, IDX_LABELS = b"\0\0\x08\x03", b"\0\0\x08\x01"
#: Mean and standard deviation that bytes are normalised by, once they are between 0 and 1, unless a file says it.
USUAL = 0.5
#: Arrays of a .npz that are read; others may lie beside them.
_INPUTS, _ARRAYS = ("images", "features"), ("images", "features", "labels", "mean", "std", "clients", "held_out")
#: Arrays with a value for each sample, and the numpy kinds of each.
_EACH = {"clients": "uifUS", "held_out": "b"}
#: Raised for files that are damaged, encrypted or packed as nothing here unpacks, or say sizes that no memory holds.
_UNREADABLE = (OSError, ValueError, RuntimeError, MemoryError, EOFError, BadZipFile, zlib.error, struct.error)
_HELP = "a .npz with labels [N] and images [N, H, W, C] or features [N, F], CIFAR's binary files or MNIST's idx files"


class LabelledMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The header of labelled samples: numpy types and shapes of inputs and labels, how bytes are normalised, and how
    many ``clients`` they are of, 0 where nobody says. ``held``: they say which are held out."""

    kind: str
    shape: tuple[int, ...]
    label_kind: str
    label_shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    clients: int = 0
    held: bool = False


def _bad(path: str | Path, why: str, help: str = _HELP) -> MeshwrightError:
    return MeshwrightError.one("D012", f"not labelled samples: {why}", place=f"--data {path}", help=help)


def samples(name: str) -> list[Path]:
    """Return the files of the labelled samples that a name means; [] where it means text."""
    if name in catalog.names("samples"):
        return [catalog.folder("samples") / f"{name}.npz"]
    path = Path(name)
    if path.suffix == ".npz":
        return [path]
    if path.is_dir():
        found = sorted(path.glob("data_batch_*.bin"))
        return found or ([path / "train.bin"] if _hundred(path / "train.bin") else [])
    if path.suffix == ".bin" and (path.name.startswith(("data_batch", "test_batch")) or _hundred(path)):
        return [path]
    if "-idx3-ubyte" in path.name or path.name.endswith((".idx3-ubyte", ".idx3-ubyte.gz")):
        return [path, path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))]
    return []


def _hundred(path: Path) -> bool:
    """Whether a file is one of CIFAR-100, beside which its labels' names lie."""
    return path.name in ("train.bin", "test.bin") and (path.parent / "fine_label_names.txt").is_file()


def look(name: str) -> None:
    """Look whether the files of labelled samples are there.

    Raises:
        MeshwrightError: D001 where one is not.
    """
    for path in samples(name):
        if not path.is_file():
            help = "name a file that is there"
            raise MeshwrightError.one("D001", f"there is no file {path}", place=f"--data {name}", help=help)


def digest(name: str) -> str:
    """A hash of the contents of labelled samples.

    Raises:
        MeshwrightError: D001 for a file that is not there.
    """
    look(name)
    whole = hashlib.sha256()
    for path in samples(name):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def read(name: str) -> dict[str, NDArray[Any]]:
    """The arrays of labelled samples: ``images`` or ``features``, ``labels`` and what else a file says.

    Raises:
        MeshwrightError: D001 for a file that is not there, D012 with what is wrong with one.
    """
    look(name)
    first, *_ = every = samples(name)
    try:
        if first.suffix == ".npz":
            arrays = _zipped(first)
        elif first.suffix == ".bin":
            arrays = _cifar(every)
        else:
            arrays = {"images": _idx(first, IDX_IMAGES), "labels": _idx(every[1], IDX_LABELS)}
    except _UNREADABLE as error:
        raise _bad(name, str(error)) from None
    _check(arrays, name)
    return arrays


def _zipped(path: Path) -> dict[str, NDArray[Any]]:
    if not is_zipfile(path):
        raise ValueError("it is no zip file of arrays, as numpy.savez writes it, or only a part of one")
    with np.load(path, allow_pickle=False) as found:
        if "labels" not in found.files or sum(key in found.files for key in _INPUTS) != 1:
            raise ValueError(f"its arrays are {', '.join(sorted(found.files)) or 'none'}")
        arrays = {key: found[key] for key in _ARRAYS if key in found.files}
    for key, values in arrays.items():
        if not isinstance(values, np.ndarray):
            raise ValueError(f"{key} is no array")
    return arrays


def _cifar(files: list[Path]) -> dict[str, NDArray[Any]]:
    labels = CIFAR100_LABELS if _hundred(files[0]) else CIFAR10_LABELS
    width = labels + 3 * CIFAR_SIDE**2
    rows = np.concatenate([np.fromfile(path, np.uint8) for path in files])
    if len(rows) % width or not len(rows):
        raise ValueError(f"{len(rows):,} bytes are not whole rows of {width:,}")
    rows = rows.reshape(-1, width)
    return {"images": rows[:, labels:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), "labels": rows[:, labels - 1]}


def _idx(path: Path, magic: bytes) -> NDArray[Any]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    if data[:4] != magic:
        raise ValueError(f"{path.name} does not begin as an idx file of bytes with {magic[3]} dimensions")
    sizes = struct.unpack(f">{magic[3]}I", data[4 : 4 + 4 * magic[3]])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * magic[3])
    if len(values) != np.prod(sizes, dtype=np.int64):
        raise ValueError(f"{path.name} says sizes {list(sizes)} and has {len(values):,} bytes")
    return values.reshape(sizes)


def _check(arrays: dict[str, NDArray[Any]], name: str) -> None:
    """Raise D012 for arrays that are no labelled samples."""
    kind = "images" if "images" in arrays else "features"
    values, labels = arrays[kind], arrays["labels"]
    for key, array in arrays.items():
        if array.dtype.kind not in (kinds := _EACH.get(key, "uif")):
            wanted = "no number" if kinds != "b" else "neither true nor false"
            raise _bad(name, f"{key} are of type {array.dtype}, which is {wanted}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise _bad(name, f"{key} has a value that is not finite", "put numbers for NaN and inf")
    if values.ndim not in ((3, 4, 5) if kind == "images" else (2,)):
        raise _bad(name, f"{kind} has the shape {list(values.shape)}")
    if not labels.ndim:
        raise _bad(name, "labels has the shape []")
    if len(values) != len(labels) or not len(values):
        raise _bad(name, f"there are {len(values):,} {kind} and {len(labels):,} labels")
    if labels.dtype.kind == "u" and (most := int(labels.max())) > np.iinfo(np.int64).max:
        raise _bad(name, f"labels has the value {most}", "number classes from 0")
    for key in ("mean", "std"):
        if key in arrays and (arrays[key].ndim > 1 or not arrays[key].size):
            raise _bad(name, f"{key} has the shape {list(arrays[key].shape)}", f"{key} [channels], or one for all")
    if "std" in arrays and (least := float(arrays["std"].min())) <= 0:
        raise _bad(name, f"std has the value {least:g}", "std [channels] above 0, by which channels are divided")
    for key in _EACH.keys() & arrays.keys():
        if arrays[key].shape != (len(labels),):
            raise _bad(name, f"{key} has the shape {list(arrays[key].shape)}, and there are {len(labels):,} labels")
    if "held_out" in arrays and (count := int(arrays["held_out"].sum())) in (0, len(labels)):
        raise _bad(name, f"held_out is true of {count:,} of {len(labels):,} samples", "true for some, false for others")


def write(folder: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the arrays of labelled samples, as :func:`read` gives them, into a folder."""
    inputs, labels = arrays.get("images", arrays.get("features")), arrays["labels"]
    kept = inputs if inputs.dtype in (np.uint8, np.float64) else inputs.astype(np.float32)
    labels = labels.astype(np.float64 if labels.dtype.kind == "f" else np.int64)
    said = {key: tuple(np.atleast_1d(arrays[key]).astype(float).tolist()) for key in ("mean", "std") if key in arrays}
    clients = 0
    if "clients" in arrays:
        _, of = np.unique(arrays["clients"], return_inverse=True)
        clients = int(of.max()) + 1
        (folder / CLIENTS).write_bytes(of.astype("<i8").tobytes())
    if "held_out" in arrays:
        (folder / HELD).write_bytes(arrays["held_out"].astype(np.uint8).tobytes())
    (folder / INPUTS).write_bytes(np.ascontiguousarray(kept).tobytes())
    (folder / LABELS).write_bytes(labels.tobytes())
    meta = LabelledMeta(
        kind=kept.dtype.str,
        shape=tuple(kept.shape),
        label_kind=labels.dtype.str,
        label_shape=tuple(labels.shape),
        clients=clients,
        held="held_out" in arrays,
        **said,
    )
    (folder / META).write_bytes(msgspec.json.encode(meta))


def read_meta(folder: Path) -> LabelledMeta:
    """Read the header of labelled samples."""
    return msgspec.json.decode((folder / META).read_bytes(), type=LabelledMeta)


def whole(folder: Path) -> bool:
    """Whether a folder holds labelled samples of the sizes that it says; raises OSError or MsgspecError for none."""
    meta = read_meta(folder)
    sizes = {INPUTS: np.dtype(meta.kind).itemsize * int(np.prod(meta.shape, dtype=np.int64))}
    sizes[LABELS] = np.dtype(meta.label_kind).itemsize * int(np.prod(meta.label_shape, dtype=np.int64))
    sizes |= {CLIENTS: 8 * meta.shape[0]} if meta.clients else {}
    sizes |= {HELD: meta.shape[0]} if meta.held else {}
    return all((folder / name).stat().st_size == size for name, size in sizes.items())
