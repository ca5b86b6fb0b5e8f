"""Hot experts chosen anew behind every step: those of each mixture that were chosen most often in it.

Hecate (2502.02581) decides in every step which experts have copies. Here the step that ends says it of the next: loads
are whole numbers that all ranks have alike, so that all choose the same, of equal loads the lower numbers first. Where
experts are computed changes no result.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.run.mesh import AxisGroup
from meshwright.run.selection_bias import StepLoads
from meshwright.spec.model import Model


class HotChoice:
    """The choice of hot experts of a rank's mixtures; without ``by_step`` they stay those of the routing."""

    def __init__(self, mixtures: list[nn.Module], model: Model, world: AxisGroup, *, by_step: bool):
        self.mixtures, self.by_step = mixtures, by_step
        self.loads = StepLoads(mixtures, model, world)

    def begin(self) -> None:
        """A step begins: what is chosen from here on counts."""
        if self.by_step:
            self.loads.begin()

    def choose(self, device: torch.device) -> None:
        """Have the most chosen experts of the step that ended on all ranks in the next."""
        if not self.by_step:
            return
        loads = self.loads.summed(device)
        for mixture in self.mixtures:
            if mixture.hot is not None:
                order = loads[self.loads.at[mixture.layer]].argsort(descending=True, stable=True)
                mixture.heat(order[: mixture.plan.hot].tolist())
