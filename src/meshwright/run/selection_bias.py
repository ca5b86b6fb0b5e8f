"""Selection biases of routers, moved behind every step by how often their experts were chosen in it.

Balance without a loss (Wang et al., 2408.15664; DeepSeek-V3, 2412.19437, section 2.1.2): an expert that was chosen more
often than the mean of its mixture over the global batch has its number lowered by the rate, one chosen less often has
it raised. No gradient takes part. Loads are whole numbers, so that their sum is the same in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
from torch import nn

from meshwright.run.collect import all_reduce
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import HeldElements
from meshwright.spec.model import Model


class StepLoads:
    """How often the experts of all mixtures were chosen in a step: on all ranks that step together (`world`), by one
    all-reduce of 8 bytes an expert."""

    def __init__(self, mixtures: list[nn.Module], model: Model, world: AxisGroup):
        self.mixtures, self.world = mixtures, world
        layers = model.routed_layers
        ends = [0, *accumulate(model.block(layer).mlp.experts for layer in layers)]
        self.total = ends[-1]
        #: Where the loads of every layer's experts are among those of all.
        self.at = {layer: slice(*ends) for layer, ends in zip(layers, pairwise(ends))}

    def begin(self) -> None:
        """A step begins: what is chosen from here on counts."""
        self._before = self._chosen()

    def summed(self, device: torch.device) -> torch.Tensor:
        """Choices of the step on all ranks, int64 [experts of all mixtures of the model]."""
        return all_reduce((self._chosen() - self._before).to(device), self.world, queue="dp")

    def _chosen(self) -> torch.Tensor:
        """Choices so far that this rank saw."""
        seen = [m.seen.counts for m in self.mixtures]
        out = torch.zeros(self.total, dtype=torch.int64, device=seen[0].device if seen else None)
        for m, counts in zip(self.mixtures, seen):
            out[self.at[m.layer]] += counts
        return out


class SelectionBiases:
    """The selection biases of a rank's mixtures, as far as its optimizer holds them. Ranks that step together
    (`world`) add up the choices of all layers in one all-reduce of 8 bytes an expert: of DeepSeek-V3's 58 mixtures of
    256 experts 119 kB a step, microseconds that predictions leave out. A `rate` of 0 leaves biases as they are, and
    exchanges nothing. Masters in fp32 keep every move, and choices see them rounded to the type of the run.
    """

    def __init__(
        self, mixtures: list[nn.Module], held: Iterable[HeldElements], model: Model, world: AxisGroup, rate: float
    ):
        self.loads, self.rate = StepLoads(mixtures, model, world), rate
        of = {m.bias.info.name: self.loads.at[m.layer] for m in mixtures if m.bias is not None}
        self.held = [(h, of[h.parameter.name]) for h in held if h.parameter.name in of] if rate else []

    def begin(self) -> None:
        """A step begins: what is chosen from here on counts."""
        if self.rate:
            self.loads.begin()

    def move(self, device: torch.device) -> None:
        """Move the biases that this rank updates, by the choices of the step on all ranks."""
        if not self.rate:
            return
        loads = self.loads.summed(device)
        for h, at in self.held:
            mine = loads[at]
            way = (mine.sum() - len(mine) * mine).sign()  # of the mean less each load
            with torch.no_grad():
                h.master.add_(way[h.start : h.stop].to(h.master.dtype), alpha=self.rate)
