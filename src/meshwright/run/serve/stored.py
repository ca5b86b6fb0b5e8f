"""Stored weights: matrices of layers in 8 or 4 bits, multiplied in the type that the engine computes in; and whole ones
in the order in which a processor's library reads them.

``int8`` and ``fp8`` have a scale for every row, ``int4`` one for every 128 numbers of a row (Frantar et al.
2408.11743); codes are symmetric about zero and rounded to the nearest. Embedding, head, norms and routers stay whole.
What that changes is approximate, and an engine says how far its matrices are from the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.run.model import Stage
from meshwright.run.moe import Mixture

#: Numbers of a row that share a scale in 4 bits.
GROUP = 128
#: The formats that are stored, with the largest code of each.
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
#: Rows from which on the library multiplies by tiles: fewer take it longer (22% for one row, 46% for two, of a matrix
#: of 1376 by 512 on one core with AVX-512), and are filled up.
TILE_ROWS = 4
#: Numbers of a matrix from which on it lies in tiles: of smaller ones the call itself takes as long as the product.
LARGE = 1 << 18


class TiledMatrix:
    """A whole matrix [n, k] of float32 in the order of oneDNN's tiles: 4 to 16 rows take half the time that they take
    with a matrix by rows or columns, and hundreds nine tenths of it. An iteration of one row takes a tenth longer."""

    def __init__(self, weight: torch.Tensor):
        self.tiles = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 4 * TILE_ROWS)
        self.times = torch.ops.mkldnn._linear_pointwise.default

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., k] times the matrix transposed."""
        count = x.numel() // x.shape[-1]
        if count >= TILE_ROWS:
            return self.times(x, self.tiles, None, "none", [], "")
        rows = F.pad(x.reshape(count, -1), (0, 0, 0, TILE_ROWS - count))
        return self.times(rows, self.tiles, None, "none", [], "")[:count].view(*x.shape[:-1], -1)


class StoredMatrix:
    """A matrix [n, k] as codes and scales: [n, 1] of whole rows, or [n, groups] of runs of :data:`GROUP`."""

    def __init__(self, weight: torch.Tensor, form: str):
        self.form, self.columns = form, weight.shape[1]
        width = GROUP if form == "int4" else self.columns
        rows = F.pad(weight, (0, -self.columns % width)).unflatten(-1, (-1, width))
        scales = (rows.abs().amax(-1) / LARGEST[form]).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (rows / scales.unsqueeze(-1)).flatten(-2)
        self.scales = scales
        if form == "fp8":
            self.codes = codes.to(torch.float8_e4m3fn)
        elif form == "int8":
            self.codes = codes.round().to(torch.int8)
        else:
            whole = (codes.round() + 8).to(torch.uint8)
            self.codes = whole[:, ::2] | whole[:, 1::2] << 4

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., k] times the matrix transposed."""
        if self.form == "int4":
            return F.linear(x, self.whole(x.dtype))
        return F.linear(x, self.codes.to(x.dtype)) * self.scales.view(-1).to(x.dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix that the codes stand for."""
        if self.form != "int4":
            return self.codes.to(dtype) * self.scales.to(dtype)
        both = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2).to(dtype) - 8
        scaled = both.unflatten(-1, (-1, GROUP)) * self.scales.to(dtype).unsqueeze(-1)
        return scaled.flatten(-2)[:, : self.columns]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales))


@torch.no_grad()
def store(stage: Stage, form: str, experts: str) -> float:
    """Store the matrices of a stage's layers in a format, those of experts in another ("" keeps them whole); returns
    how far they are from what they were: the root mean square of the differences, relative to that of the numbers."""
    apart = whole = 0.0
    for parameter in list(_matrices(stage)):
        said = experts if parameter.expert else form
        if not said:
            continue
        many = parameter.data if parameter.dim() == 3 else parameter.data.unsqueeze(0)
        stored = [StoredMatrix(one, said) for one in many]
        for one, was in zip(stored, many):
            apart += (one.whole(was.dtype) - was).double().square().sum().item()
            whole += was.double().square().sum().item()
        parameter.stored = stored if parameter.dim() == 3 else stored[0]
        parameter.data = parameter.data.new_empty(0)
    return (apart / whole) ** 0.5 if whole else 0.0


@torch.no_grad()
def pack(stage: Stage) -> None:
    """Store the large matrices of a stage's layers that are whole as a processor's library reads them, experts'
    aside."""
    for parameter in list(_matrices(stage)):
        if parameter.dim() == 2 and parameter.numel() >= LARGE:
            parameter.stored = TiledMatrix(parameter.data)
            parameter.data = parameter.data.new_empty(0)


def _matrices(stage: Stage) -> Iterator[nn.Parameter]:
    """The matrices of layers; a mixture's router is none, and its experts' lie in threes of dimensions."""
    for module in stage.layers.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 or (parameter.dim() == 2 and not isinstance(module, (Mixture, nn.ParameterList))):
                yield parameter
        if isinstance(module, nn.ParameterList):
            yield from (parameter for parameter in module if parameter.dim() == 2)
