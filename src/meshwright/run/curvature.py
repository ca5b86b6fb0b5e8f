"""The diagonal of the Hessian by one random vector: ``v * (H v)`` for v of signs, right in the mean (Hutchinson 1989),
with the product as a difference of gradients, ``H v = (g(x + d v) - g(x - d v)) / 2 d`` up to d^2."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch

from meshwright.run.optimizer import Optimizer
from meshwright.run.scaled import Scaled
from meshwright.sync.record import SyncPolicy


class Curvature:
    """The diagonal that an optimizer with scales of curvature gathers at the end of each round: that of its last batch,
    where that step begins, by two more passes. Every replica draws its own signs."""

    def __init__(self, optimizer: Optimizer, apart: float, seed: int, replica: int):
        self.optimizer, self.apart, self.place = optimizer, apart, (seed, replica)

    def signs(self, step: int, name: str, like: torch.Tensor) -> torch.Tensor:
        """The signs of a replica for a parameter in a step."""
        mixed = blake2b(repr((*self.place, step, name)).encode(), digest_size=8).digest()
        drawn = torch.Generator(like.device).manual_seed(int.from_bytes(mixed, "little") >> 1)
        signs = torch.randint(0, 2, (len(like),), generator=drawn, device=like.device)
        return (2 * signs - 1).to(like.dtype)

    def gather(self, step: int, run: Callable[[], torch.Tensor], publish: Callable[[], None]) -> None:
        """Pass the batch to both sides, if the step ends a round; `run` sums gradients, of parameters that `publish`
        gives to the passes."""
        scaled = self.optimizer.torch
        if not isinstance(scaled, Scaled) or (step + 1) % scaled.every:
            return
        held = self.optimizer.held
        signs = [self.signs(step, h.parameter.name, h.master) for h in held]
        kept, found = [h.master.detach().clone() for h in held], []
        for side in (1, -1):
            with torch.no_grad():
                for h, values, one in zip(held, kept, signs):
                    h.master.copy_(values).add_(one, alpha=side * self.apart)
            publish()
            run()
            found.append([h.gradient.detach().to(h.master.dtype, copy=True) for h in held])
        with torch.no_grad():
            for h, values in zip(held, kept):
                h.master.copy_(values)
        publish()
        for master, one, above, below in zip(self.optimizer.masters, signs, *found):
            scaled.curvature[master] = one * (above - below) / (2 * self.apart)


def curvature_of(policy: SyncPolicy, optimizer: Optimizer, seed: int, replica: int) -> Curvature | None:
    """Return what gathers curvature for the scales of a policy, None where it has no such scales."""
    if policy.scaling is None or not policy.scaling.apart:
        return None
    return Curvature(optimizer, policy.scaling.apart, seed, replica)
