"""Frozen matrices that are stored quantised, and the base as pieces of the published model: it is read, and never
written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.run.linear import matmul
from meshwright.run.lora.formats import FORMATS, quantise, restore, twice
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import PARAM, Parameter, Part, TensorPiece


class PackedMatrix(nn.Module):
    """A frozen matrix [n, k] that stands for `parts`, quantised, and made whole for each product alone."""

    def __init__(self, name: str, shape: tuple[int, int], parts: Sequence[Part], how: str, std: float):
        super().__init__()
        self.info, self.how, self.std = Parameter(name, shape, tuple(parts)), FORMATS[how], std
        n, k = shape
        codes = torch.zeros((n, k * self.how.bits // 8), dtype=torch.uint8)
        scales = torch.zeros((n, self.how.width(k)), dtype=self.how.scales)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        for number in range(len(parts)):
            self.register_buffer(f"second_{number}", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., k] times the matrix transposed."""
        return _PackedProduct.apply(x, self.codes, self.scales, self)

    def whole(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of a type, of all its codes and scales."""
        return restore(codes, self._scales(scales) if self.how.double else scales, self.how, dtype)

    def _scales(self, codes: torch.Tensor) -> torch.Tensor:
        """Scales that are stored in 8 bits, fp32."""
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        width = codes.shape[1]
        for number, part in enumerate(self.info.parts):
            rows = _rows(part, len(codes))
            every = self.how.width(part.shape[1])
            first = part.offset[0] * every + part.offset[1] // self.how.block
            place = first + torch.arange(rows.stop - rows.start, device=codes.device).unsqueeze(1) * every
            place = place + torch.arange(width, device=codes.device)
            out[rows] = twice(codes[rows], getattr(self, f"second_{number}").to(codes.device), place)
        return out

    def fill(self, published: Callable[[Part], torch.Tensor], group: AxisGroup) -> None:
        """Quantise every `published` matrix whole, and take what this rank has of it: its rows among the ranks of
        `group` where the matrix is sharded by them."""
        codes, scales = _local(self.codes), _local(self.scales)
        begin = _first_row(self.info.shape[0], group) if isinstance(self.codes, DTensor) else 0
        for number, part in enumerate(self.info.parts):
            made = quantise(published(part), self.how)
            setattr(self, f"second_{number}", made.second.to(codes.device))
            rows = _rows(part, self.info.shape[0])
            lo, hi = max(rows.start, begin), min(rows.stop, begin + len(codes))
            if lo >= hi:
                continue
            there = slice(part.offset[0] + lo - rows.start, part.offset[0] + hi - rows.start)
            here, column = slice(lo - begin, hi - begin), part.offset[1]
            first = column * self.how.bits // 8
            codes[here] = made.codes[there, first : first + codes.shape[1]]
            first = column // self.how.block if self.how.block else 0
            scales[here] = made.scales[there, first : first + scales.shape[1]]


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales, matrix):
        ctx.matrix = matrix
        ctx.save_for_backward(codes, scales)
        return x @ matrix.whole(codes, scales, x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        codes, scales = ctx.saved_tensors
        back = grad @ ctx.matrix.whole(codes, scales, grad.dtype) if ctx.needs_input_grad[0] else None
        return back, None, None, None


def times(x: torch.Tensor, weight: torch.Tensor | PackedMatrix, low: str = "") -> torch.Tensor:
    """x [..., k] times a weight [n, k] transposed, stored as it is or quantised; `low`: as of
    :func:`~meshwright.run.linear.matmul`."""
    return weight(x) if isinstance(weight, PackedMatrix) else matmul(x, weight, low)


def _rows(part: Part, count: int) -> slice:
    """The rows of a local matrix of so many that a part is in."""
    return slice(*part.select[0].indices(count)[:2])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter, or all of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def _first_row(rows: int, group: AxisGroup) -> int:
    """The first row of this rank's shard: torch cuts rows into chunks of equal size, the last ones short."""
    return min(rows, -(-rows // group.size) * group.index)


class FrozenTensor(NamedTuple):
    """A frozen parameter that is stored as it is: the module of its stage, its name there, and what it stands for."""

    stage: nn.Module
    name: str
    info: Parameter


class Base:
    """The frozen part of a rank's stages, which exchanges may shard after this was made."""

    def __init__(self, stages: Mapping[int, nn.Module], shard: AxisGroup):
        self.shard = shard
        modules = [m for stage in stages.values() for m in stage.modules()]
        self.matrices = [m for m in modules if isinstance(m, PackedMatrix)]
        self.plain = [
            FrozenTensor(stage, name, parameter.info)
            for stage in stages.values()
            for name, parameter in stage.named_parameters()
            if not parameter.requires_grad and hasattr(parameter, "info")
        ]

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield what is stored as it is, live."""
        for stage, name, info in self.plain:
            parameter = stage.get_parameter(name)
            local, start = _local(parameter), 0
            if isinstance(parameter, DTensor):
                start = _first_row(info.shape[0], self.shard) * (local.numel() // max(1, len(local)))
            if local.numel():
                yield TensorPiece(PARAM, info, start, start + local.numel(), local.view(-1), True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the published tensors that are quantised, with their shapes."""
        return {part.name: tuple(part.shape) for matrix in self.matrices for part in matrix.info.parts}

    def fill(self, published: Callable[[Part], torch.Tensor]) -> None:
        """Fill the quantised matrices."""
        for matrix in self.matrices:
            matrix.fill(published, self.shard)
