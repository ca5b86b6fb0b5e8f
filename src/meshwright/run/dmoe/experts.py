"""The experts of a mixture that one process holds, with an optimizer of their own: each takes a step by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import nn

from meshwright.run.exchanges import Types
from meshwright.run.job import Job
from meshwright.run.mesh import AxisGroup
from meshwright.run.optimizer import Optimizer
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.swarm.parcels import as_bytes, of_bytes

ALONE = AxisGroup(name="self", ranks=(0,), index=0)


class HeldExperts:
    """Experts of one mixture: their ``parameters`` [experts, ...], masters and moments."""

    def __init__(self, parameters: Sequence[nn.Parameter], types: Types, job: Job):
        self.parameters = tuple(parameters)
        self.count = len(self.parameters[0])
        self.grads = types.grads
        held = []
        for one in self.parameters:
            values = one.detach().view(-1)
            master = values if values.dtype == types.masters else values.to(types.masters)
            nothing = master.new_empty(0, dtype=types.grads)
            held.append(HeldElements(one.info, 0, one.numel(), master, nothing, 1, True, True))
        # nobody knows the length of the gradient of all parameters when experts take their steps
        settings = msgspec.structs.replace(job.settings, clip=0.0)
        device = self.parameters[0].device
        self.optimizer = Optimizer(held, job.train.optimizer, settings, ALONE, device, moments=types.moments)

    def update(self, gradients: Sequence[torch.Tensor], step: int) -> None:
        """Take a step along gradients of the parameters, with the learning rate of this step."""
        held = self.optimizer.held
        for i, gradient in enumerate(gradients):
            held[i] = held[i]._replace(gradient=gradient.reshape(-1).to(self.grads))
        self.optimizer.update(step, 0.0)
        self.publish()

    def publish(self) -> None:
        """Compute with the masters."""
        with torch.no_grad():
            for parameter, held in zip(self.parameters, self.optimizer.held):
                if held.master.data_ptr() != parameter.data_ptr():
                    parameter.view(-1).copy_(held.master)

    def set_step(self, updates: int) -> None:
        """Go on as after so many updates: parameters and moments were loaded."""
        self.optimizer.set_step(updates)
        self.publish()

    def pieces(self) -> list[TensorPiece]:
        """Parameters and moments, live."""
        return self.optimizer.pieces()

    def _values(self, first: int, count: int) -> Iterator[torch.Tensor]:
        for piece in self.pieces():
            yield piece.values.view(self.count, -1)[first : first + count].view(-1)

    def state(self, first: int, count: int) -> bytes:
        """Parameters and moments of so many experts from the `first` on."""
        return b"".join(as_bytes(values) for values in self._values(first, count))

    def fill(self, first: int, count: int, state: bytes) -> int:
        """Take such a state up; the bytes that it has."""
        at = 0
        with torch.no_grad():
            for values in self._values(first, count):
                values.copy_(of_bytes(state[at : at + values.nbytes]).view(values.dtype))
                at += values.nbytes
        return at
