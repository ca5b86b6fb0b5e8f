"""Adapters per request: LoRA factors beside the weights of an engine, many adapters in one iteration.

Every matrix that a decoder's products go through may have, for each adapter, A [r, k] and B [n, r] of the parts that
it stands for (query, key and value of one fused matrix); tokens of an adapter's requests have scale * B A x added
(S-LoRA, Sheng et al. 2311.03285, section 4). Which adapters are on the device is the decider's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.run.lora.peft import PREFIX, TENSORS, read_config
from meshwright.run.pieces import Part
from meshwright.run.serve.packed import PackedTokens
from meshwright.spec import naming
from meshwright.spec.model import Model


class AdapterFactors(NamedTuple):
    """The factors of one adapter for rows ``at`` of a matrix: ``a`` [r, k], and ``b`` [n, r] with the scale in it."""

    at: slice
    a: torch.Tensor
    b: torch.Tensor


class AdaptedMatrix:
    """A matrix with adapters by their number: those that are ``kept`` on the host and those that are ``here``, on the
    device."""

    def __init__(self, pool: AdapterWeights):
        self.pool = pool
        self.kept: dict[int, list[AdapterFactors]] = {}
        self.here: dict[int, list[AdapterFactors]] = {}

    def add(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return out [tokens, 1, n], the product of x [tokens, 1, k], with what adapters add to it."""
        for number, tokens in self.pool.tokens.items():
            for at, a, b in self.here.get(number, ()):
                some = x if tokens is None else x[tokens]
                made = (some @ a.T) @ b.T
                if tokens is None:
                    out[..., at] += made
                else:
                    out[tokens, :, at] += made
        return out


class AdapterWeights:
    """The adapters of a rank's layers, read from folders of PEFT's, in order of their numbers. ``tokens`` are those of
    every adapter in the iteration under way, None where all are."""

    def __init__(self, parameters: Iterable[nn.Parameter], model: Model, folders: Sequence[str], device: torch.device):
        """Read all adapters into the host's memory.

        Raises:
            MeshwrightError: H009 for a folder that holds none that is served, H006 for one that cannot be read, H007
                for factors of no matrix here or of another shape.
        """
        self.device = device
        self.tokens: dict[int, torch.Tensor | None] = {}
        #: Bytes of the largest adapter on this rank.
        self.num_bytes = 0
        mine = [p for p in parameters if len(p.info.shape) == 2]
        self.matrices = []
        for parameter in mine:
            parameter.adapted = AdaptedMatrix(self)
            self.matrices.append(parameter.adapted)
        for number, folder in enumerate(folders):
            self._read(number, Path(folder), mine, model)

    def begin(self, packed: PackedTokens) -> None:
        """Note whose tokens an iteration computes."""
        self.tokens, first, places = {}, 0, {}
        for row, number in zip(packed.rows, packed.adapters):
            if number >= 0:
                places.setdefault(number, []).append(torch.arange(first, first + row.new))
            first += row.new
        for number, found in places.items():
            tokens = torch.cat(found)
            self.tokens[number] = None if len(tokens) == first else tokens.to(self.device)

    def hold(self, numbers: Iterable[int]) -> None:
        """Have these adapters on the device, and no others."""
        wanted = set(numbers)
        for matrix in self.matrices:
            for number in matrix.here.keys() - wanted:
                del matrix.here[number]
            for number in wanted & matrix.kept.keys() - matrix.here.keys():
                some = matrix.kept[number]
                matrix.here[number] = [AdapterFactors(f.at, f.a.to(self.device), f.b.to(self.device)) for f in some]

    def _read(self, number: int, folder: Path, parameters: Sequence[nn.Parameter], model: Model) -> None:
        scale, used, size, wrong = read_config(folder, model).scale, set(), 0, []
        try:
            with safe_open(folder / TENSORS, framework="pt") as opened:
                there = set(opened.keys())
                for parameter in parameters:
                    for part in parameter.info.parts:
                        stem = f"{PREFIX}{part.name.removesuffix('.weight')}"
                        names = [f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"]
                        if not there.issuperset(names):
                            continue
                        used.update(names)
                        a, b = (opened.get_tensor(name).to(parameter.dtype) for name in names)
                        shape = part.shape[::-1] if part.transposed else part.shape
                        if (b.shape[0], a.shape[1]) != tuple(shape) or a.shape[0] != b.shape[1]:
                            wrong.append(f"{stem}: {list(b.shape)} and {list(a.shape)} for {list(shape)}")
                            continue
                        factors = _mine(part, parameter.info.shape, a, b * scale)
                        parameter.adapted.kept.setdefault(number, []).append(factors)
                        size += sum(one.numel() * one.element_size() for one in (factors.a, factors.b))
        except (OSError, SafetensorError) as error:
            raise MeshwrightError.one("H006", f"cannot read adapters: {error}", place=str(folder)) from None
        layers = naming.names(model).layer.format(0).partition("0")[0]
        mine = {name for name in there if self._held(name, layers, parameters)}
        wrong += [f"{name}: no matrix that adapters are served of" for name in sorted(mine - used)]
        if wrong:
            help = "an adapter of the attention and dense MLPs of this model, as PEFT writes it"
            raise MeshwrightError.one("H007", "; ".join(wrong[:4]), place=str(folder), help=help)
        self.num_bytes = max(self.num_bytes, size)

    def _held(self, name: str, layers: str, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether a factor is of no layer, or of one of this rank's."""
        stem = name.removeprefix(PREFIX)
        number = stem.removeprefix(layers).partition(".")[0]
        if not stem.startswith(layers) or not number.isdecimal():
            return True
        mine = f"{layers}{number}."
        return any(part.name.startswith(mine) for p in parameters for part in p.info.parts)


def _mine(part: Part, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> AdapterFactors:
    """This rank's rows of B and columns of A, for the part of a matrix that a rank has."""
    row, column = part.offset[::-1] if part.transposed else part.offset
    at = part.select[0]
    rows = len(range(*at.indices(shape[0])))
    return AdapterFactors(at, a[:, column : column + shape[1]].contiguous(), b[row : row + rows].contiguous())
