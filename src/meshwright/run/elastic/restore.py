"""The newest step that is whole in the memories of some ranks, given to ranks under any plan.

What a rank wants and what the slots hold are runs of local tensors, which meet as boxes of published tensors: the
geometry of checkpoints (:mod:`meshwright.run.blocks`). So one mechanism replaces a rank, shrinks a job, moves layers to
other stages and shards states anew. A run that a rank lacks comes from the memory of the holder with least to send.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.run import safetensors_file
from meshwright.run.agree import largest, share
from meshwright.run.blocks import blocks, cover, overlaps
from meshwright.run.checkpoint.commit import located
from meshwright.run.checkpoint.format import Index, Meta, RankIndex, StateEntry
from meshwright.run.checkpoint.loading import Source, fill
from meshwright.run.elastic.memory import KeptRuns, Slot
from meshwright.run.trainer import Trainer


class Restored(NamedTuple):
    """The steps that a job goes on after, and those that had been done by any rank whose memory is there."""

    step: int
    newest: int


class Offer(msgspec.Struct, frozen=True):
    """A slot of a rank, as it tells the others."""

    step: int
    kept: KeptRuns


class _Pool(NamedTuple):
    """All runs of one step in the memories: their index, each once, and who holds them: (rank, slot, entry there)."""

    index: Index
    holders: list[list[tuple[int, int, StateEntry]]]


def restored(trainer: Trainer, slots: list[Slot]) -> Restored | None:
    """Fill the trainer with the newest step that the memories of all ranks hold whole; None where there is none. Every
    rank must call this, with the slots that it inherited."""
    group = trainer.mesh["world"]
    said = share(group, msgspec.json.encode([Offer(slot.step, slot.kept) for slot in slots]))
    offers = [msgspec.json.decode(data, type=list[Offer]) if data else [] for data in said]
    newest = max((offer.step for some in offers for offer in some), default=-1)
    for step, epoch in sorted({(o.step, o.kept.epoch) for some in offers for o in some}, reverse=True):
        pool = _pool(offers, step, epoch)
        if largest(group, [int(_lacks(trainer, pool.index))]) == [0]:
            _fetch(trainer, pool, slots)
            trainer.set_step(step)
            return Restored(step, newest)
    return None


def _pool(offers: list[list[Offer]], step: int, epoch: int) -> _Pool:
    """Pool what there is of one step of one formation."""
    numbers: dict[tuple, int] = {}
    layouts: dict = {}
    tensors: dict[str, tuple[int, ...]] = {}
    entries: list[StateEntry] = []
    holders: list[list[tuple[int, int, StateEntry]]] = []
    for rank, some in enumerate(offers):
        for slot, offer in enumerate(some):
            if (offer.step, offer.kept.epoch) != (step, epoch):
                continue
            index: RankIndex = offer.kept.index
            tensors |= index.tensors
            for entry in index.entries:
                layout = layouts.setdefault(index.layouts[entry.layout], len(layouts))
                what = (entry.state, layout, entry.start, entry.stop)
                number = numbers.setdefault(what, len(numbers))
                if number == len(entries):
                    entries.append(msgspec.structs.replace(entry, layout=layout))
                    holders.append([])
                holders[number].append((rank, slot, entry))
    meta = Meta(step=step, seed=0, model="", model_hash="", plan="", world=len(offers))
    made = Index(meta=meta, tensors=tensors, files=(), layouts=tuple(layouts), entries=tuple(entries))
    return _Pool(made, holders)


def _lacks(trainer: Trainer, index: Index) -> bool:
    """Whether some element that this rank wants is in no memory."""
    found = located(index)
    wanted = {(p.key, part.name): tuple(part.shape) for p in trainer.common_pieces() for part in p.parameter.parts}
    return any(cover(shape, [block for block, _ in found.get(key, ())]) for key, shape in wanted.items())


def _fetch(trainer: Trainer, pool: _Pool, slots: list[Slot]) -> None:
    """Fill the trainer's pieces from the memories: this rank's own, and messages from others."""
    group, found, pieces = trainer.mesh["world"], located(pool.index), trainer.common_pieces()
    wanted = set()
    for piece in pieces:
        for block in blocks(piece.parameter, piece.start, piece.stop):
            there = found[piece.key, block.name]
            wanted |= {there[i][1] for i, _, _ in overlaps(block, [one for one, _ in there])}
    values: dict[int, torch.Tensor] = {}
    for number in wanted:
        for rank, slot, entry in pool.holders[number]:
            if rank == group.index:
                values[number] = slots[slot].run(entry)
    lacking = share(group, msgspec.json.encode(sorted(wanted - values.keys())))
    works, buffers = [], []
    for source, target, number, slot, entry in _messages(pool, [msgspec.json.decode(said) for said in lacking]):
        if target == group.index:
            dtype = safetensors_file.DTYPES[entry.dtype]
            values[number] = torch.empty(entry.stop - entry.start, dtype=dtype)
            works.append(dist.irecv(values[number].view(torch.uint8), group.ranks[source], group=group.handle))
        elif source == group.index:
            buffers.append(slots[slot].run(entry).view(torch.uint8))
            works.append(dist.isend(buffers[-1], group.ranks[target], group=group.handle))
    for work in works:
        work.wait()
    sources = {
        key: [Source(block, partial(values.__getitem__, number)) for block, number in some if number in values]
        for key, some in found.items()
    }
    fill(pieces, sources)


def _messages(pool: _Pool, lacking: list[list[int]]) -> list[tuple[int, int, int, int, StateEntry]]:
    """(source, target, run, slot, entry) of every message, the same on all ranks: each from the holder that has least
    to send so far."""
    load: dict[int, int] = defaultdict(int)
    out = []
    for target, numbers in enumerate(lacking):
        for number in numbers:
            rank, slot, entry = min(pool.holders[number], key=lambda one: (load[one[0]], one[:2]))
            load[rank] += (entry.stop - entry.start) * safetensors_file.DTYPES[entry.dtype].itemsize
            out.append((rank, target, number, slot, entry))
    return out
