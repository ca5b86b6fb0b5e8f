"""Random models of a few tensors, held by several processes in arbitrary ways, for tests of checkpoints and weights."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import Parameter, Part, TensorPiece

STATES = ("param", "exp_avg", "exp_avg_sq")
ALONE = AxisGroup(name="world", ranks=(0,), index=0)


def damage(file: Path, state: str) -> None:
    """Flip one bit of every tensor of a state in one of a checkpoint's files."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    mine = [entry["data_offsets"][0] for key, entry in header.items() if key.split("/")[0] == state]
    assert mine
    for at in mine:
        data[start + at] ^= 1
    file.write_bytes(data)


def world(rank: int, num_ranks: int) -> AxisGroup:
    """All processes of a launch as a group."""
    import torch.distributed as dist

    return AxisGroup(name="world", ranks=tuple(range(num_ranks)), index=rank, handle=dist.group.WORLD)


class Family(NamedTuple):
    """Published tensors that may be one local parameter: equal shapes, joined by rows (``fused``) or stacked."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool = False


#: Odd sizes, so that nothing divides evenly.
FAMILIES = (
    Family(("embed",), (13, 6)),
    Family(("q", "k", "v"), (9, 7)),
    Family(("up.0", "up.1", "up.2", "up.3", "up.4"), (5, 4), stacked=True),
    Family(("norm",), (11,)),
    Family(("scale",), ()),
    Family(("conv",), (3, 5, 2)),
)
NAMES = {name: family.shape for family in FAMILIES for name in family.names}


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[tuple[str, str], torch.Tensor]:
    """The whole state of the model: random bits that are numbers."""
    draw = torch.Generator().manual_seed(seed)
    return {(s, n): torch.randn(shape, generator=draw).to(dtype) for s in STATES for n, shape in NAMES.items()}


class Held(NamedTuple):
    """Elements [start, stop) of a parameter's flattened local tensor, for one process."""

    parameter: Parameter
    start: int
    stop: int
    owner: bool


def sharding(seed: int, num_ranks: int) -> list[list[Held]]:
    """Who holds what: every tensor cut into boxes, boxes into flat runs, some held by several of which one writes."""
    draw = random.Random(seed)
    ranks: list[list[Held]] = [[] for _ in range(num_ranks)]
    for family in FAMILIES:
        for parameter in _parameters(family, draw):
            numel = torch.Size(parameter.shape).numel()
            for start, stop in _cuts(numel, draw.randint(1, 4), draw):
                holders = draw.sample(range(num_ranks), draw.randint(1, num_ranks))
                for rank in holders:
                    ranks[rank].append(Held(parameter, start, stop, rank == holders[0]))
    return ranks


def _cuts(length: int, count: int, draw: random.Random) -> list[tuple[int, int]]:
    """[0, length) in at most `count` runs at random places."""
    places = sorted({0, length, *(draw.randint(0, length) for _ in range(count - 1))})
    return list(itertools.pairwise(places))


def _parameters(family: Family, draw: random.Random) -> list[Parameter]:
    """Local parameters that together are a family, once: bands along one dimension; in each either one parameter per
    tensor, or one for several, joined or stacked, perhaps transposed, perhaps with padding behind."""
    if not family.shape:
        return [Parameter(n, (), (Part(n, (), (), ()),)) for n in family.names]
    dim = draw.randrange(len(family.shape))
    out = []
    for first, last in _cuts(family.shape[dim], draw.randint(1, 3), draw):
        block = (*family.shape[:dim], last - first, *family.shape[dim + 1 :])
        offset = tuple(first if i == dim else 0 for i in range(len(block)))
        turned = len(block) == 2 and draw.random() < 0.4
        local = block[::-1] if turned else block
        for a, b in _cuts(len(family.names), draw.randint(1, len(family.names)), draw):
            names, pad = family.names[a:b], draw.choice((0, 0, 2))
            title = f"{'+'.join(names)}@{offset}"
            if family.stacked:
                shape = (len(names) + pad, *local)
                selects = [(i, slice(None)) for i in range(len(names))]
            else:
                shape = (len(names) * local[0] + pad, *local[1:])
                selects = [(slice(i * local[0], (i + 1) * local[0]),) for i in range(len(names))]
            parts = tuple(Part(n, family.shape, offset, s, turned) for n, s in zip(names, selects))
            out.append(Parameter(title, shape, parts))
    return out


def pieces(
    held: list[Held], whole: dict[tuple[str, str], torch.Tensor] | None, dtype=torch.float32
) -> list[TensorPiece]:
    """What a process holds of `whole`, made by :meth:`Part.view` from the published side; padding is -7. Without
    `whole` everything is -7."""
    out = []
    for state in STATES:
        for parameter, start, stop, owner in held:
            local = torch.full(parameter.shape, -7.0, dtype=dtype)
            for part in parameter.parts if whole is not None else ():
                block = part.view(local)
                block.copy_(whole[state, part.name][part.region(tuple(block.shape))])
            out.append(TensorPiece(state, parameter, start, stop, local.reshape(-1)[start:stop].clone(), owner))
    return out


def differences(found: list[TensorPiece], expected: list[TensorPiece]) -> list[str]:
    """The pieces whose values are not, bit for bit, those expected."""
    return [
        f"{a.key} {a.parameter.name}[{a.start}:{a.stop}]"
        for a, b in zip(found, expected, strict=True)
        if not torch.equal(a.values, b.values)
    ]
