"""Parameters of a rank: tensors that know which blocks of the published model they are, and who else holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

from meshwright.run.environment import num_cores
from meshwright.run.pieces import Parameter, Part

#: Standard deviation of initial weights (GPT-2, Radford et al. 2019; Megatron-LM's init_method_std).
INIT_STD = 0.02
#: Threads that draw initial values at most: each holds one published tensor in fp32.
MOST_DRAWING = 8


class Maker:
    """Makes a rank's parameters, all of one type on one device. Where adapters alone are trained the rest is `frozen`,
    of a type of its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, frozen: torch.dtype | None = None):
        self.device, self.dtype, self.frozen = device, dtype, frozen

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: list[Part],
        *,
        init: str = "normal",
        std: float = INIT_STD,
        copies: int = 1,
        sums: int = 1,
        expert: bool = False,
        adapter: bool = False,
    ) -> nn.Parameter:
        """A parameter standing for `parts`.

        `init` is normal (of the deviation `std`), uniform (from -`std` to `std`), ones or zeros. `copies` neighbouring
        tensor-parallel ranks hold it alike. `sums` neighbouring tensor-parallel ranks each have a part of its gradient.
        `expert`: it is reduced over the expert mesh's replicas. `adapter`: it is trained though the base is frozen.
        """
        still = self.frozen is not None and not adapter
        dtype = self.frozen if still else self.dtype
        made = nn.Parameter(torch.zeros(shape, device=self.device, dtype=dtype), requires_grad=not still)
        made.info = Parameter(name, shape, tuple(parts))
        made.init, made.std = init, std
        made.copies, made.sums, made.expert = copies, sums, expert
        return made


def initialise(parameters: Iterable[nn.Parameter], seed: int, *, threads: int = 0) -> None:
    """Fill parameters with their initial values. Every published tensor is drawn whole from a generator of its own
    name, then cut, so that the values depend neither on the plan nor on the device, nor on who draws first: the host
    draws, on so many `threads`, or on the cores of a GPU's share."""
    many = list(parameters)
    if not threads and many and many[0].is_cuda:
        threads = min(MOST_DRAWING, num_cores() // max(1, torch.cuda.device_count()))
    if threads <= 1:
        for parameter in many:
            _fill(parameter, seed)
        return
    with ThreadPoolExecutor(threads) as drawing:  # the largest first; torch draws without Python's lock
        list(drawing.map(partial(_fill, seed=seed), sorted(many, key=torch.numel, reverse=True)))


def _fill(parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        for part in parameter.info.parts:
            block = part.view(parameter)
            if parameter.init in ("normal", "uniform"):
                whole = drawn(part, seed, parameter.std, uniform=parameter.init == "uniform")
                block.copy_(whole[part.region(tuple(block.shape))])
            else:
                block.fill_(1.0 if parameter.init == "ones" else 0.0)


def drawn(part: Part, seed: int, std: float, *, uniform: bool = False) -> torch.Tensor:
    """Return the first values of a whole published tensor, fp32: normal of the deviation `std`, or `uniform` from
    -`std` to `std`."""
    digest = hashlib.sha256(f"{seed}:{part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if uniform:
        return torch.rand(part.shape, generator=generator).mul_(2 * std).sub_(std)
    return torch.randn(part.shape, generator=generator).mul_(std)
