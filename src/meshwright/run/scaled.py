"""Scaled steps: gradients over the root of squares that are gathered once in a round (Chezhegov et al. 2406.00846)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.sync.record import SharedScales


class Scaled(torch.optim.Optimizer):
    """Steps along gradients in the scales of ``scale``, the squares or the curvature gathered, [values] each; ``every``
    steps are a round, at whose end they gather those of the last gradient. What averages them between replicas comes
    after that."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, every: int, scaling: SharedScales):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.every, self.scaling, self.count = every, scaling, 0
        #: The curvature that is gathered at the end of a round in place of squares, where scales are of it.
        self.curvature: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of all parameters; of a round's last step their scales too."""
        rounds, last = self.count // self.every, (self.count + 1) % self.every == 0
        keeps = self.scaling.keeps(rounds)
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                gathered, curved = self.state[p]["scale"], self.scaling.apart > 0
                along = p.grad
                if rounds:
                    scales = gathered.abs() if curved else gathered.sqrt()
                    along = p.grad / scales.clamp_(min=self.scaling.least)
                p.sub_(along.add(p, alpha=decay), alpha=rate)
                if last and curved:
                    gathered.mul_(keeps).add_(self.curvature[p], alpha=1 - keeps)
                elif last:
                    gathered.mul_(keeps).addcmul_(p.grad, p.grad, value=1 - keeps)
        self.count += 1
        self.curvature = {}
