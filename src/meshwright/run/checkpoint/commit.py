"""Making a written checkpoint visible: checks, index, rename; and removing old ones."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.blocks import TensorBox, blocks, cover
from meshwright.run.checkpoint.format import HIDDEN, INDEX, Index, Meta, RankIndex, complete, encode, folder_name, merge
from meshwright.run.pieces import ALONE
from meshwright.run.safetensors_file import sync_folder, write_file


def commit(root: Path, temporary: Path, meta: Meta, num_ranks: int, keep: int) -> Path:
    """Turn a folder in which every rank has written into a checkpoint, and remove all but the newest `keep`.

    A reader sees the whole checkpoint or nothing of it, and a kill at any instant leaves the ones before it.

    Returns:
        Its folder: ``step-00000020``, or the next generation of it when there is one of this step.

    Raises:
        MeshwrightError: H004 when what was written is not every element of every tensor once.
        OSError: from the disk.
    """
    index = gather(temporary, meta, num_ranks)
    for rank in range(num_ranks):
        _rank_file(temporary, rank).unlink()
    write_file(temporary / INDEX, encode(index))
    sync_folder(temporary)
    generations = [generation for step, generation, _ in complete(root) if step == meta.step]
    folder = root / folder_name(meta.step, max(generations, default=-1) + 1)
    temporary.rename(folder)
    sync_folder(root)
    retire(root, folder, keep)
    return folder


def gather(temporary: Path, meta: Meta, num_ranks: int) -> Index:
    """The index of what all ranks wrote into a folder.

    Raises:
        MeshwrightError: H004 when it is not every element of every parameter once, H005 without the part of a rank.
    """
    ranks = []
    for rank in range(num_ranks):
        file = _rank_file(temporary, rank)
        try:
            ranks.append(msgspec.json.decode(file.read_bytes(), type=RankIndex))
        except FileNotFoundError:
            raise MeshwrightError.one(
                "H005",
                f"what rank {rank} wrote is not visible to rank 0",
                place=str(file),
                help="checkpoints go into a folder that all nodes share",
            ) from None
    tensors, files, layouts, entries = merge(ranks)
    index = Index(meta=meta, tensors=tensors, files=tuple(files), layouts=tuple(layouts), entries=tuple(entries))
    alone = {name for state, name in located(index) if state in ALONE}
    wrong = incomplete(index, {("param", name) for name in tensors if name not in alone})
    if wrong:
        raise MeshwrightError(wrong)
    return index


def incomplete(index: Index, wanted: Iterable[tuple[str, str]] = ()) -> list[Diagnostic]:
    """H004 for every (state, tensor), of those that there are and those `wanted`, of which the entries are not every
    element once."""
    found, said = located(index), {}
    wrong = []
    for state, name in sorted({*found, *wanted}):
        held = [block for block, _ in found.get((state, name), ())]
        # a parameter and its moments are usually cut alike
        cut = (name, *map(id, held))
        if cut not in said:
            said[cut] = cover(index.tensors[name], held)
        if said[cut]:
            wrong.append(
                Diagnostic(
                    code="H004",
                    message=f"{state} of {name} is incomplete: {said[cut]}",
                    help="every element is written by exactly one process",
                )
            )
    return wrong


def located(index: Index) -> dict[tuple[str, str], list[tuple[TensorBox, int]]]:
    """For every (state, published tensor) the blocks that hold it, each with the number of its entry."""
    parameters = [index.parameter(i) for i in range(len(index.layouts))]
    run = cache(lambda layout, start, stop: blocks(parameters[layout], start, stop))
    found = defaultdict(list)
    for number, entry in enumerate(index.entries):
        for block in run(entry.layout, entry.start, entry.stop):
            found[entry.state, block.name].append((block, number))
    return dict(found)


def retire(root: Path, newest: Path, keep: int) -> None:
    """Remove older generations of the `newest` checkpoint, and the oldest beyond `keep`; each out of sight first."""
    found = complete(root)
    same = {step for step, _, folder in found if folder == newest}
    old = [(step in same, folder) for step, _, folder in found if folder != newest]
    others = [folder for replaced, folder in old if not replaced]
    for folder in [f for replaced, f in old if replaced] + others[: max(0, len(others) + 1 - keep)]:
        hidden = root / f"{HIDDEN}{folder.name}.old"
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"
