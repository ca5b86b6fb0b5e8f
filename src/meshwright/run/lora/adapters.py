"""Adapters beside the frozen matrices of a layer: B (A x) times a scale is added to what a matrix gives.

Among tensor-parallel ranks the factor next to the split side of a matrix is split with it, and the other is whole on
every rank, each with a part of its gradient: into a region A reads the whole input and B gives this rank's features;
out of it A reads this rank's features, and B gives a partial result that is summed with the matrix' own. So an adapter
exchanges nothing of its own in a pass.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from meshwright.run.dropout import dropout
from meshwright.run.linear import grouped_matmul, matmul
from meshwright.run.lora.base import PackedMatrix, times
from meshwright.run.pieces import Part

if TYPE_CHECKING:
    from meshwright.run.parts import Pass, Shared

#: Sites of adapters' dropout begin here, behind those of the model's own.
SITES = 1 << 32


class Adapted(NamedTuple):
    """A published matrix that may have an adapter: the ``target`` that LoRA calls it, its ``name`` and ``shape`` [out,
    in], the (row, column) ``offset`` of this rank's block and the block's ``size``. In a fused product it is in the
    matrix number ``where`` from row ``row`` on. ``alike`` neighbouring tensor-parallel ranks hold this block. Where it
    is several ``blocks`` below each other, these are the (published row, rows) of each."""

    target: str
    name: str
    shape: tuple[int, int]
    offset: tuple[int, int]
    size: tuple[int, int]
    where: int = 0
    row: int = 0
    alike: int = 1
    blocks: tuple[tuple[int, int], ...] = ()


class Adapter(nn.Module):
    """The two factors of one matrix: A [rank, in] with values of Kaiming's uniform as PEFT draws them, B [out, rank] of
    zeros."""

    def __init__(self, shared: Shared, of: Adapted):
        super().__init__()
        self.shared, self.of, lora, tp = shared, of, shared.lora, shared.tp.size
        (rows, columns), (out, inner) = of.size, of.shape
        inwards = columns == inner  # into a tensor-parallel region, or out of it
        every = {"adapter": True, "copies": tp, "sums": tp}
        own = {"adapter": True, "copies": of.alike, "sums": of.alike}
        a, b = f"{of.name}.lora_A.weight", f"{of.name}.lora_B.weight"
        first = Part(a, (lora.rank, inner), (0, of.offset[1]), (slice(None),))
        second, row = [], 0
        for first_row, count in of.blocks or ((of.offset[0], rows),):
            second.append(Part(b, (out, lora.rank), (first_row, 0), (slice(row, row + count),)))
            row += count
        shape, bound = (lora.rank, columns), inner**-0.5
        self.a = shared.make(a, shape, [first], init="uniform", std=bound, **(every if inwards else own))
        self.b = shared.make(b, (rows, lora.rank), second, init="zeros", **(own if inwards else every))
        self.site = SITES + zlib.crc32(of.name.encode())

    def forward(self, x: torch.Tensor, p: Pass | None) -> torch.Tensor:
        """x [S, b, in of this rank] as what is added to the matrix' result [S, b, out of this rank]."""
        shared = self.shared
        lora = shared.lora
        if lora.dropout and p is not None and p.step >= 0:
            said = {"seed": shared.seed, "step": p.step, "site": self.site, "first": self.of.offset[1]}
            x = dropout(x, p.rows, lora.dropout, **said)
        return matmul(matmul(x, self.a) * lora.scale, self.b)


class ExpertAdapter(nn.Module):
    """The two factors of one matrix of every expert that is here: A [experts, rank, in], B [experts, out, rank]. The
    published ones are named by expert, as if each had a matrix `word`."""

    def __init__(self, shared: Shared, experts: list[str], word: str, out: int, inner: int):
        """`experts`: the published prefixes of those that are here."""
        super().__init__()
        self.scale, rank = shared.lora.scale, shared.lora.rank
        said = {"expert": True, "adapter": True}

        def parts(side: str, shape: tuple[int, int]) -> list[Part]:
            return [Part(f"{e}{word}.lora_{side}.weight", shape, (0, 0), (i,)) for i, e in enumerate(experts)]

        first, second = (rank, inner), (out, rank)
        name, std = f"{experts[0]}{word}.lora_", inner**-0.5
        self.a = shared.make(f"{name}A", (len(experts), *first), parts("A", first), init="uniform", std=std, **said)
        self.b = shared.make(f"{name}B", (len(experts), *second), parts("B", second), init="zeros", **said)

    def forward(self, rows: torch.Tensor, groups: list[int]) -> torch.Tensor:
        """Rows [t, in] in consecutive `groups` of experts as what is added to the results [t, out]."""
        return grouped_matmul(grouped_matmul(rows, self.a, groups) * self.scale, self.b, groups)


class AdaptedProducts(nn.Module):
    """The adapters of products that read one input."""

    def __init__(self, adapters: list[Adapter]):
        super().__init__()
        self.every = nn.ModuleList(adapters)

    def add(self, made: list[torch.Tensor], x: torch.Tensor, p: Pass | None) -> list[torch.Tensor]:
        """Add what adapters give of x to what the matrices gave of it."""
        for one in self.every:
            made[one.of.where].narrow(-1, one.of.row, one.of.size[0]).add_(one(x, p))
        return made


def adapters_of(shared: Shared, matrices: list[Adapted]) -> AdaptedProducts | None:
    """The adapters of those of some matrices that are targets; None where none is."""
    lora = shared.lora
    found = [Adapter(shared, one) for one in matrices if lora is not None and one.target in lora.targets]
    return AdaptedProducts(found) if found else None


def products(
    shared: Shared,
    x: torch.Tensor,
    weights: list[torch.Tensor | PackedMatrix],
    adapters: AdaptedProducts | None,
    p: Pass | None,
    word: str = "",
) -> list[torch.Tensor]:
    """Products of hidden states into a tensor-parallel region; with frozen matrices with what adapters add, for which
    the input is made whole once for all of them. `word`: the operator that they are."""
    if shared.lora is None:
        return [shared.enter(x, weight, low=shared.low_of(word)) for weight in weights]
    whole = shared.entered(x)
    made = [times(whole, weight, shared.low) for weight in weights]
    return made if adapters is None else adapters.add(made, whole, p)
