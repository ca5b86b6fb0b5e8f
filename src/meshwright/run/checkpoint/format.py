"""The format of a checkpoint on disk: a folder that every plan can write and every other plan can read.

    step-00000020/index.json                 what there is, and where
    step-00000020/rank-00000.safetensors     the values that rank 0 wrote, and so on

As in Universal Checkpointing (Lian et al., 2406.18820), a process writes what it holds as it holds it, and the index
says what that is in terms of the published tensors. Nothing is gathered or converted when saving; a reader cuts what it
needs out of what is there. An *entry* is a run of a flattened local tensor, as a 1-D tensor in one of the files; a
*layout* is the shape of a local tensor and the published blocks in it, shared by all entries that have it.

Of random numbers only the seed is kept: they are functions of (seed, step, site, token). So is the data: the next batch
is that of the step. The index is one line of JSON, ``{"format_version": 1, "crc32": ..., "index": {...}}``.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.run.pieces import Parameter, Part
from meshwright.spec.architecture import Model

VERSION = 1
INDEX = "index.json"
#: Keys of the state: the parameter and the two moments of AdamW.
STATES = ("param", "exp_avg", "exp_avg_sq")
#: Begin of the names of what is not, or no longer, a checkpoint.
HIDDEN = ".step-"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Meta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of training: `step` optimizer steps are done, and the next batch is that of `step`. ``world`` processes
    trained ``plan``. ``model_hash`` is :func:`identity` of the model. ``extra``: what the caller wants back."""

    step: int
    seed: int
    model: str
    model_hash: str
    plan: str
    world: int
    extra: dict[str, Any] = {}


class PartRecord(msgspec.Struct, frozen=True, array_like=True):
    """A part of a layout: published name, offset in it, what of the local tensor it is (a number drops a dimension,
    a pair is a range), and whether it is transposed."""

    name: str
    offset: tuple[int, ...]
    select: tuple[int | tuple[int, int], ...]
    transposed: bool


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """A local tensor: its shape and its parts."""

    shape: tuple[int, ...]
    parts: tuple[PartRecord, ...]


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A safetensors file of the folder: its size, and the CRC-32 of everything before its tensors."""

    name: str
    size_bytes: int
    header_crc32: int


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """Elements [start, stop) of a flattened local tensor: state, layout (by number), type, CRC-32 of the bytes, file
    (by number) and key in the file."""

    state: str
    layout: int
    start: int
    stop: int
    dtype: str
    crc32: int
    file: int
    key: str


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a checkpoint but the values. ``tensors``: the shape of every published tensor."""

    meta: Meta
    tensors: dict[str, tuple[int, ...]]
    files: tuple[File, ...]
    layouts: tuple[TensorLayout, ...]
    entries: tuple[StateEntry, ...]

    def parameter(self, layout: int) -> Parameter:
        """A layout as the parameter that it was."""
        made = self.layouts[layout]
        parts = tuple(
            Part(p.name, self.tensors[p.name], p.offset, tuple(_selection(s) for s in p.select), p.transposed)
            for p in made.parts
        )
        return Parameter("", made.shape, parts)


class RankIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index of one process's own file, numbered for itself; those of all processes become the :class:`Index`."""

    tensors: dict[str, tuple[int, ...]]
    file: File | None
    layouts: tuple[TensorLayout, ...]
    entries: tuple[StateEntry, ...]


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format_version: int
    crc32: int = -1
    index: msgspec.Raw = msgspec.Raw(b"")


class _Version(msgspec.Struct):
    format_version: int


def _selection(said: int | tuple[int, int]) -> int | slice:
    return said if isinstance(said, int) else slice(*said)


def identity(model: Model) -> str:
    """A hash of all that is computed by a model: everything but its name and where its dimensions come from."""
    said = msgspec.to_builtins(model)
    for key in ("name", "source", "notes", "unknown_fields"):
        said.pop(key)
    # as if there were no such fields: models that have nothing frozen keep their hash
    usual = [(said, "frozen", 0), (said["embedding"], "source", -1)]
    for some, key, value in (*usual, *((block, "locked", False) for block in said["blocks"])):
        if some.get(key) == value:
            some.pop(key)
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()[:16]


def encode(index: Index) -> bytes:
    """The text of an index file."""
    body = msgspec.json.encode(index)
    return msgspec.json.encode(_Envelope(format_version=VERSION, crc32=zlib.crc32(body), index=msgspec.Raw(body)))


def decode(data: bytes, file: Path) -> Index:
    """The index of such a text, which `file` holds.

    Raises:
        MeshwrightError: X007 for another version, H002 for anything but what was written.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != VERSION:
            raise MeshwrightError.one(
                "X007",
                f"a checkpoint of format version {version}; this is version {VERSION}",
                place=str(file),
                help="resume with the version of meshwright that wrote it",
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        if zlib.crc32(envelope.index) != envelope.crc32:
            raise damaged("its checksum does not agree", file.parent, file.name)
        return msgspec.json.decode(envelope.index, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(f"not an index: {error}", file.parent, file.name) from None


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        MeshwrightError: H001 when there is none, and as :func:`decode`.
    """
    file = folder / INDEX
    try:
        return decode(file.read_bytes(), file)
    except OSError as error:
        raise MeshwrightError.one("H001", f"cannot read a checkpoint: {error.strerror}", place=str(file)) from None


def damaged(what: str, folder: Path, file: str = "") -> MeshwrightError:
    """H002: a file of a checkpoint is not as it was written."""
    return MeshwrightError.one("H002", f"damaged checkpoint: {what}", place=str(folder / file), help=older(folder))


def older(folder: Path) -> str:
    """How to go on from the checkpoint before one that is of no use."""
    return f"remove {folder}: the newest that is left is taken then"


def complete(root: Path) -> list[tuple[int, int, Path]]:
    """(step, generation, folder) of the checkpoints in a folder, oldest first. One that is saved again at the same
    step is a new generation of it."""
    return [one for one in _named(root) if (one[2] / INDEX).is_file()]


def _named(root: Path) -> list[tuple[int, int, Path]]:
    """(step, generation, folder) of what has a checkpoint's name, oldest first."""
    if not root.is_dir():
        return []
    found = ((_FOLDER.fullmatch(folder.name), folder) for folder in root.iterdir())
    return sorted((int(m[1]), int(m[2] or 0), folder) for m, folder in found if m)


def latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder, None when it has none."""
    found = complete(Path(root))
    return found[-1][2] if found else None


def find(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in it.

    Raises:
        MeshwrightError: H001 when it is neither; H002 when the newest has lost its index. A checkpoint gets its name
            when it is whole, so that going on from an older one would lose steps that were saved.
    """
    path = Path(path)
    folder = path if (path / INDEX).is_file() else latest(path)
    newest = [] if folder == path else _named(path)[-1:]
    if newest and newest[0][2] != folder:
        raise damaged(f"it has lost its {INDEX}", newest[0][2])
    if folder is None:
        help = "name a folder step-... with an index.json in it, or the folder of such folders"
        if (path / ".metadata").is_file():
            help = f"torch wrote it: meshwright weights {path} --format checkpoint --model MODEL --to FOLDER"
        raise MeshwrightError.one(
            "H001", f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}", help=help
        )
    return folder


def folder_name(step: int, generation: int = 0) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08d}" + (f"-{generation}" if generation else "")


def merge(
    ranks: Iterable[RankIndex],
) -> tuple[dict[str, tuple[int, ...]], list[File], list[TensorLayout], list[StateEntry]]:
    """Merge the indices of all processes into (tensors, files, layouts, entries), equal layouts once.

    Raises:
        MeshwrightError: H004 when two processes say different shapes of one tensor.
    """
    tensors: dict[str, tuple[int, ...]] = {}
    files: list[File] = []
    layouts: dict[TensorLayout, int] = {}
    entries: list[StateEntry] = []
    for rank in ranks:
        for name, shape in rank.tensors.items():
            if tensors.setdefault(name, shape) != shape:
                raise MeshwrightError.one("H004", f"{name} is {list(tensors[name])} and {list(shape)} in one model")
        numbers = [layouts.setdefault(made, len(layouts)) for made in rank.layouts]
        entries += [msgspec.structs.replace(e, layout=numbers[e.layout], file=len(files)) for e in rank.entries]
        files += [rank.file] if rank.file else []
    return tensors, files, list(layouts), entries
