"""Steps kept in memory: what a rank holds of a step, and what its neighbour alone holds, outside of the process that
trains.

A slot is anonymous memory behind a file descriptor (``memfd_create``), which the process that trains inherits from the
process that keeps it: the first may be killed at any instant, and what it had written whole is there for the next. It
is gone when both are. A slot begins with the number of its step, which is written last; a slot that is being written
is none.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from meshwright.run import safetensors_file
from meshwright.run.agree import share
from meshwright.run.checkpoint.format import RankIndex, StateEntry
from meshwright.run.checkpoint.write import layout, shapes
from meshwright.run.pieces import TensorPiece
from meshwright.run.trainer import Trainer

#: Slots of one formation: two steps of this rank that were kept one after the other, and the same of the neighbour
#: before it.
SLOTS = 4
_ALIGNED = 64


class KeptRuns(msgspec.Struct, frozen=True):
    """The contents of a slot: runs of local tensors, whose places in its values are their keys, in the formation
    ``epoch``; ``num_bytes`` of values."""

    epoch: int
    index: RankIndex
    num_bytes: int


class Slot:
    """A slot of memory behind a file descriptor."""

    def __init__(self, fd: int, kept: KeptRuns | None = None):
        """A slot made anew for what is to be kept, or, if that is left out, the one that is there."""
        self.fd = fd
        if kept is not None:
            text = msgspec.json.encode(kept)
            front = -(-(16 + len(text)) // _ALIGNED) * _ALIGNED
            os.ftruncate(fd, front + max(kept.num_bytes, 1))
            self._map = mmap.mmap(fd, 0)
            self._map[:16] = bytes(8) + len(text).to_bytes(8, "little")
            self._map[16 : 16 + len(text)] = text
        else:
            self._map = mmap.mmap(fd, 0)
            length = int.from_bytes(self._map[8:16], "little")
            kept = msgspec.json.decode(self._map[16 : 16 + length], type=KeptRuns)
            front = -(-(16 + length) // _ALIGNED) * _ALIGNED
        self.kept = kept
        self.values = torch.frombuffer(self._map, dtype=torch.uint8, offset=front)[: kept.num_bytes]

    @property
    def step(self) -> int:
        """Steps after which the kept state was whole; -1 while it is written."""
        return int.from_bytes(self._map[:8], "little") - 1

    def commit(self, step: int) -> None:
        """Say what is kept: the state after so many steps; -1 while it is written."""
        self._map[:8] = (step + 1).to_bytes(8, "little")

    def run(self, entry: StateEntry) -> torch.Tensor:
        """The values of a run [stop - start], in place."""
        dtype = safetensors_file.DTYPES[entry.dtype]
        at = int(entry.key)
        return self.values[at : at + (entry.stop - entry.start) * dtype.itemsize].view(dtype)


def written(fds: Sequence[int]) -> list[Slot]:
    """The slots among file descriptors that hold a whole step."""
    found = [Slot(fd) for fd in fds if os.fstat(fd).st_size]
    return [slot for slot in found if slot.step >= 0]


def name_of(piece: TensorPiece) -> str:
    """A name of what a piece is, equal on all ranks that hold the same."""
    said = msgspec.json.encode((piece.key, layout(piece.parameter), piece.start, piece.stop))
    return hashlib.sha256(said).hexdigest()[:24]


def _index(pieces: Sequence[TensorPiece]) -> tuple[RankIndex, list[int]]:
    """The index of pieces whose values stand one after the other, and where each ends."""
    layouts: dict = {}
    entries, ends, at = [], [], 0
    for p in pieces:
        number = layouts.setdefault(layout(p.parameter), len(layouts))
        dtype = safetensors_file.name_of(p.values.dtype)
        entries.append(StateEntry(p.key, number, p.start, p.stop, dtype, 0, 0, str(at)))
        at += -(-p.values.nbytes // 8) * 8
        ends.append(at)
    return RankIndex(tensors=shapes(pieces), file=None, layouts=tuple(layouts), entries=tuple(entries)), ends


class Snapshots:
    """The steps of one rank in memory: its own after every step, and beside the next step a copy at its neighbour of
    what no other rank holds. Every rank must make one; `fds` are :data:`SLOTS` new slots."""

    def __init__(self, trainer: Trainer, fds: Sequence[int], epoch: int):
        group = trainer.mesh["world"]
        pieces = list({name_of(p): p for p in trainer.common_pieces()}.values())
        names = [name_of(p) for p in pieces]
        everyone = share(group, msgspec.json.encode(names))
        held = Counter(name for said in everyone for name in msgspec.json.decode(said, type=list[str]))
        alone = [p for p, name in zip(pieces, names) if held[name] == 1]
        ordered = [*alone, *(p for p, name in zip(pieces, names) if held[name] > 1)]
        index, ends = _index(ordered)
        self.live = [p.values for p in ordered]
        self.own = [Slot(fd, KeptRuns(epoch, index, ends[-1] if ends else 0)) for fd in fds[:2]]
        self.copies = [[slot.run(e) for e in index.entries] for slot in self.own]
        first = RankIndex(tensors=shapes(alone), file=None, layouts=index.layouts, entries=index.entries[: len(alone)])
        self.sent = ends[len(alone) - 1] if alone else 0
        offered = share(group, msgspec.json.encode(KeptRuns(epoch, first, self.sent)))
        before = msgspec.json.decode(offered[group.index - 1], type=KeptRuns)
        self.copied = before.num_bytes if not group.alone else 0
        self.theirs = [Slot(fd, before) for fd in fds[2:]] if self.copied else []
        self.after, self.before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
        self.handle = None if group.alone else dist.new_group(list(group.ranks), backend="gloo")
        self.sent = 0 if group.alone else self.sent
        self.works: list[dist.Work] = []
        self.step, self.turn = -1, 0

    def keep(self, step: int) -> None:
        """Keep the state after so many steps, and begin to send what this rank alone holds."""
        self.turn = 1 - self.turn
        own = self.own[self.turn]
        own.commit(-1)
        with torch.no_grad():
            torch._foreach_copy_(self.copies[self.turn], self.live)
        own.commit(step)
        self.step = step
        if self.copied:
            self.theirs[self.turn].commit(-1)
            self.works.append(dist.irecv(self.theirs[self.turn].values, self.before, group=self.handle))
        if self.sent:
            self.works.append(dist.isend(own.values[: self.sent], self.after, group=self.handle))

    def arrived(self) -> None:
        """Wait until the neighbours have the last step: before this rank comes to an exchange that the next step
        cannot end without, so that no rank is two steps ahead of what is in memory twice."""
        while self.works:
            self.works.pop().wait()
        if self.copied and self.step >= 0:
            self.theirs[self.turn].commit(self.step)
