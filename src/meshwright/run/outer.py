"""Outer steps: what replicas do with the mean of what a round changed (Douillard et al. 2311.08105).

The mean change is taken as a gradient of the parameters as they were at the last exchange, with momentum that looks
ahead if it is Nesterov's, as torch's SGD has it. Changes are parameters after the round minus those before, so that the
step goes along them.
"""

from __future__ import annotations

import torch

from meshwright.sync.record import Outer

#: States of a rank, in checkpoints: the outer momentum, what arrived and is applied later, and a replica's own change
#: of the round before.
MOMENTUM, ARRIVED, OWN = "outer_momentum", "round_arrived", "round_own"


class OuterStep:
    """The outer step of `length` values like ``like``, with its momentum; `lag` steps after they were sent."""

    def __init__(self, outer: Outer, length: int, like: torch.Tensor, lag: int):
        self.outer = outer
        kept = [(MOMENTUM, bool(outer.momentum)), (ARRIVED, lag > 0), (OWN, outer.eager)]
        self.state = {key: like.new_zeros(length) for key, wanted in kept if wanted}

    def along(self, change: torch.Tensor) -> torch.Tensor:
        """The step that a mean change is taken for; the momentum goes on."""
        outer = self.outer
        if outer.penalty != 1:
            change = change / outer.penalty
        if outer.momentum:
            momentum = self.state[MOMENTUM]
            momentum.mul_(outer.momentum).add_(change)
            if outer.clip:
                momentum.clamp_(-outer.clip, outer.clip)
            change = change + outer.momentum * momentum if outer.nesterov else momentum
        return outer.rate * change if outer.rate != 1 else change

    def late(self, change: torch.Tensor, replicas: int) -> torch.Tensor:
        """The mean change of the round before; an eager replica takes its own of this round for its part of it (Kale et
        al. 2502.12996)."""
        arrived = self.state[ARRIVED]
        if not self.outer.eager:
            return arrived
        before = self.state[OWN]
        mean = arrived + (change - before) / replicas
        before.copy_(change)
        return mean

    def mixed(self, own: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The result beside a share of a replica's own parameters."""
        return torch.lerp(result, own, self.outer.mix) if self.outer.mix else result
