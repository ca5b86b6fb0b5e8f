"""Loading a checkpoint under any plan, and nothing of one that is not whole.

Everything is checked before the first value changes: the index, that it is this model, that it holds every element
wanted, and the checksum of every byte, each read once by one of the ranks. Then every rank copies, published tensor by
published tensor, the boxes in which its pieces meet what is in the files; these are mapped, so that only what is needed
is read and nothing is assembled.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.agree import CPU, agree, share
from meshwright.run.blocks import TensorBox, blocks, cover, overlaps
from meshwright.run.checkpoint.commit import located
from meshwright.run.checkpoint.format import Index, Meta, damaged, find, older, read_index
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import TensorPiece

#: Violations of one kind that are listed before the rest is counted.
_LISTED = 8
#: Shapes of published tensors by name.
_Shapes = dict[str, tuple[int, ...]]


class Source(NamedTuple):
    """A block of a published tensor, and how to get the 1-D values that it is a view of."""

    block: TensorBox
    values: Callable[[], torch.Tensor]


def load(
    path: str | Path, pieces: Sequence[TensorPiece], group: AxisGroup, *, model_hash: str, device: torch.device = CPU
) -> Meta:
    """Fill `pieces` from a checkpoint, or from the newest in a folder of them; collective.

    Values are converted to the pieces' types. Padding is left as it is. `model_hash`: ``identity`` of the model that is
    being trained.

    Returns:
        Where training was.

    Raises:
        MeshwrightError: on every rank alike, and before any piece has changed: H001 no checkpoint, X007 another format
            version, H002 damaged, H003 of another model, H004 not everything is in it.
    """
    wrong: Iterable[Diagnostic] = ()
    reader = None
    try:
        reader = CheckpointReader(find(path))
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(group, wrong, device)
    wanted = _wanted(pieces)
    if reader.index.meta.model_hash != model_hash:  # on every rank: what is of no use to it another one may want
        every = share(group, msgspec.json.encode(wanted), device)
        wanted = {name: shape for said in every for name, shape in msgspec.json.decode(said, type=_Shapes).items()}
    wrong = foreign(reader.index, wanted, model_hash) or missing(reader.sources, pieces, reader.folder)
    agree(group, wrong, device)
    agree(group, reader.wrong(group.index, group.size), device)
    try:
        fill(pieces, reader.sources)
        wrong = ()
    except (OSError, SafetensorError) as error:
        wrong = damaged(str(error), reader.folder).diagnostics
    agree(group, wrong, device)
    return reader.index.meta


class CheckpointReader:
    """A checkpoint's index, and its values where they are wanted.

    Raises:
        MeshwrightError: H001, X007 or H002 for the index.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        self._open = cache(self._open_file)

    def _open_file(self, number: int):
        return safe_open(self.folder / self.index.files[number].name, framework="pt")

    def values(self, number: int) -> torch.Tensor:
        """The values of an entry, mapped from its file: [stop - start].

        Raises:
            OSError, SafetensorError: the file cannot be read or is not one.
        """
        entry = self.index.entries[number]
        return self._open(entry.file).get_tensor(entry.key)

    @cached_property
    def sources(self) -> dict[tuple[str, str], list[Source]]:
        """The blocks of the checkpoint, by state and published tensor."""
        return {
            key: [Source(block, partial(self.values, number)) for block, number in found]
            for key, found in located(self.index).items()
        }

    def wrong(self, share: int = 0, num_shares: int = 1) -> list[Diagnostic]:
        """H002 for every damaged file, in one of `num_shares` equal shares of all bytes."""
        entries = defaultdict(list)
        for number in _mine(self.index, share, num_shares):
            entries[self.index.entries[number].file].append(number)
        found = []
        for file, numbers in sorted(entries.items()):
            try:
                what = self._wrong_header(file) or next(filter(None, map(self._wrong, numbers)), "")
            except OSError as error:
                what = error.strerror or str(error)
            except SafetensorError as error:
                what = str(error)
            if what:
                found.append(damaged(what, self.folder, self.index.files[file].name).diagnostics[0])
        return found

    def _wrong_header(self, number: int) -> str:
        file = self.index.files[number]
        path = self.folder / file.name
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{size} bytes, not {file.size_bytes}"
        return "" if safetensors_file.header_checksum(path) == file.header_crc32 else "its header's checksum disagrees"

    def _wrong(self, number: int) -> str:
        entry, values = self.index.entries[number], self.values(number)
        same = (safetensors_file.name_of(values.dtype), values.shape) == (entry.dtype, (entry.stop - entry.start,))
        if same and safetensors_file.checksum(safetensors_file.raw(values)) == entry.crc32:
            return ""
        return f"the checksum of {entry.key} disagrees"


def _mine(index: Index, share: int, num_shares: int) -> list[int]:
    """The entries that one of several processes checks: the largest first, each to who has least."""
    loads, out = [(0, i) for i in range(num_shares)], []
    sizes = [(e.stop - e.start) * safetensors_file.DTYPES[e.dtype].itemsize for e in index.entries]
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, who = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[number], who))
        if who == share:
            out.append(number)
    return out


def _wanted(pieces: Sequence[TensorPiece]) -> _Shapes:
    return {part.name: tuple(part.shape) for piece in pieces for part in piece.parameter.parts}


def foreign(index: Index, wanted: _Shapes, model_hash: str) -> list[Diagnostic]:
    """H003 when the checkpoint is of another model than that of the published tensors `wanted`: all of them where the
    hashes differ, else any."""
    differ = [
        f"{name} is {list(index.tensors[name])} there and {list(shape)} here" if name in index.tensors else f"no {name}"
        for name, shape in sorted(wanted.items())
        if index.tensors.get(name) != shape
    ]
    if not differ and index.meta.model_hash == model_hash:
        return []
    if index.meta.model_hash != model_hash:
        differ += [f"{name} is there and not here" for name in sorted(index.tensors.keys() - wanted.keys())]
    said = "; ".join(some(differ)) or "same tensors, but they compute something else"
    return [
        Diagnostic(
            code="H003",
            message=f"a checkpoint of another model ({index.meta.model}): {said}",
            help="resume with the model that was trained, or load its weights alone",
        )
    ]


def some(lines: Sequence[str]) -> list[str]:
    """The first of many, and how many more there are."""
    rest = len(lines) - _LISTED
    return [*lines[:_LISTED], *([f"and {rest} more"] if rest > 0 else [])]


def missing(
    sources: Mapping[tuple[str, str], Sequence[Source]], pieces: Sequence[TensorPiece], folder: Path
) -> list[Diagnostic]:
    """H004 for every tensor of which the sources in a folder are not every element once, among those that pieces
    want."""
    wanted = {(p.key, part.name): tuple(part.shape) for p in pieces for part in p.parameter.parts}
    return [
        Diagnostic(
            code="H004",
            message=f"{state} of {name} is incomplete: {what}",
            help=older(folder),
        )
        for (state, name), shape in sorted(wanted.items())
        if (what := cover(shape, [s.block for s in sources.get((state, name), ())]))
    ]


def fill(pieces: Sequence[TensorPiece], sources: Mapping[tuple[str, str], Sequence[Source]]) -> None:
    """Copy into every piece's live values what the sources hold of them, one published tensor after another."""
    wanted = defaultdict(list)
    for piece in pieces:
        for block in blocks(piece.parameter, piece.start, piece.stop):
            wanted[piece.key, block.name].append((block, piece.values))
    with torch.no_grad():
        for key, targets in sorted(wanted.items(), key=lambda item: item[0]):
            held = sources[key]
            there = [source.block for source in held]
            for target, values in targets:
                for i, low, size in overlaps(target, there):
                    from_file = there[i].view(held[i].values(), low, size)
                    target.view(values, low, size).copy_(from_file)
