"""Layer-wise optimizers: the step of each published matrix is scaled by the norm of its weights over another norm.

LAMB (You et al. 1904.00962, algorithm 2) takes that of Adam's update with its decay, LARS (You et al. 1708.03888) those
of the gradient and of the decay. Norms are of whole matrices, whatever part of them a rank holds: squares are added up
over all ranks that step together, two numbers a matrix. Vectors (norms, biases) step unscaled, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.agree import share
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import HeldElements, Parameter
from meshwright.run.record import recorder

#: The share of a weight's norm that LARS steps by (its trust coefficient), and its momentum.
TRUST, MOMENTUM = 0.001, 0.9
#: The decays of LAMB's moments, as its authors train BERT.
BETAS = (0.9, 0.999)


class MatrixPart(NamedTuple):
    """Elements [start, stop) of a held piece that belong to one published matrix, which has a `number`."""

    piece: int
    start: int
    stop: int
    number: int


class Matrices:
    """The published matrices that the ranks of a group hold together, and which elements of each this rank has."""

    def __init__(self, held: Sequence[HeldElements], group: AxisGroup, device: torch.device):
        self.group, self.device = group, device
        found = [(i, *run) for i, h in enumerate(held) if h.decays for run in _runs(h)]
        mine = "\n".join(sorted({name for *_, name in found}))
        names = sorted({n for text in share(group, mine.encode(), device) for n in text.decode().split("\n") if n})
        known = {name: number for number, name in enumerate(names)}
        self.names = names
        self.stretches = [MatrixPart(i, start, stop, known[name]) for i, start, stop, name in found]
        self.numbers = torch.tensor([s.number for s in self.stretches], dtype=torch.int64, device=device)
        self.copies = torch.tensor([held[s.piece].copies for s in self.stretches], dtype=torch.float64, device=device)

    def norms(self, *kinds: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norms of whole matrices [kinds, stretches], of values that lie as the stretches do; collective."""
        total = torch.zeros((len(kinds), len(self.names)), dtype=torch.float64, device=self.device)
        for row, values in zip(total, kinds):
            squares = [torch.linalg.vector_norm(v, dtype=_wide(v)).to(torch.float64).square() for v in values]
            if squares:
                row.index_add_(0, self.numbers, torch.stack(squares) / self.copies)
        if not self.group.alone:
            with recorder().span("all_reduce", "dp", group=self.group.ranks, num_bytes=total.nbytes):
                dist.all_reduce(total, group=self.group.handle)
        return total.sqrt()[:, self.numbers]


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _runs(h: HeldElements) -> list[tuple[int, int, str]]:
    """The runs of a held piece's elements that are of one published tensor each, with its name."""
    parameter: Parameter = h.parameter
    if len(parameter.parts) == 1:
        return [(0, h.stop - h.start, parameter.parts[0].name)]
    mark = torch.full(parameter.shape, -1, dtype=torch.int32)
    for number, part in enumerate(parameter.parts):
        part.view(mark).fill_(number)
    mine = mark.view(-1)[h.start : h.stop]
    ends = (torch.nonzero(mine[1:] != mine[:-1]).view(-1) + 1).tolist()
    bounds = [0, *ends, len(mine)]
    runs = [(a, b, int(mine[a])) for a, b in pairwise(bounds)]
    return [(a, b, parameter.parts[number].name) for a, b, number in runs if number >= 0]


class Layerwise(torch.optim.Optimizer):
    """An optimizer whose scales of matrices come from their norms, over `matrices` of the parameters in their order.

    An update is made twice, for its norm and to be applied, so that no more than one piece of it is held at a time."""

    def __init__(self, groups: list[dict[str, Any]], ordered: list[torch.Tensor], matrices: Matrices, **said: Any):
        super().__init__(groups, said)
        self.ordered, self.matrices = ordered, matrices
        self.of: dict[int, list[tuple[int, slice]]] = {}
        for number, s in enumerate(matrices.stretches):
            self.of.setdefault(s.piece, []).append((number, slice(s.start, s.stop)))

    def _each(self) -> Iterator[tuple[int, torch.Tensor, dict[str, Any]]]:
        """Yield the number, the parameter and the group of each."""
        known = {id(p): group for group in self.param_groups for p in group["params"]}
        for number, p in enumerate(self.ordered):
            yield number, p, known[id(p)]

    def _cut(self, number: int, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the stretches of values like a parameter's."""
        for _, where in self.of.get(number, ()):
            yield values[where]

    def _scale(self, number: int, update: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
        """Multiply the stretches of a parameter's update by their scales, in place."""
        for stretch, where in self.of.get(number, ()):
            update[where] *= scales[stretch]
        return update


class Lamb(Layerwise):
    """LAMB: Adam's update and the decay, times the weight's norm over that of both."""

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Adam's update of a parameter with its decay."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        count = state["step"].item()
        root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**count)).div_(root).add_(p, alpha=group["weight_decay"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of all parameters."""
        for _, p, group in self._each():
            state, (beta1, beta2) = self.state[p], group["betas"]
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        weights, updates = self.matrices.norms(
            (part for number, p, _ in self._each() for part in self._cut(number, p)),
            (part for number, p, group in self._each() for part in self._cut(number, self._update(p, group))),
        )
        scales = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0).tolist()
        for number, p, group in self._each():
            p.sub_(self._scale(number, self._update(p, group), scales), alpha=group["lr"])


class Lars(Layerwise):
    """LARS: gradient and decay, times a share of the weight's norm over theirs, with momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of all parameters."""
        weights, slopes = self.matrices.norms(
            (part for number, p, _ in self._each() for part in self._cut(number, p)),
            (part for number, p, _ in self._each() for part in self._cut(number, p.grad)),
        )
        decays = [group["weight_decay"] for number, _, group in self._each() for _ in self.of.get(number, ())]
        both = slopes + torch.tensor(decays, dtype=torch.float64, device=weights.device) * weights
        scales = torch.where((weights > 0) & (slopes > 0), TRUST * weights / both, 1.0).tolist()
        for number, p, group in self._each():
            update = self._scale(number, torch.add(p.grad, p, alpha=group["weight_decay"]), scales)
            kept = self.state[p]["momentum_buffer"]
            kept.mul_(MOMENTUM).add_(update, alpha=group["lr"])
            p.sub_(kept)
