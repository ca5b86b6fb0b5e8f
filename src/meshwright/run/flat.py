"""The exchanged state of a trainer as one run of values: what clients and servers send, whole or as a codec's bytes."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.run.codecs import on_tensors
from meshwright.run.trainer import Trainer
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import PARAMETERS, Fragment


class Flat:
    """Exchanged state of a trainer, fragment by fragment in one order: its masters as one run of values, as bytes, and
    as what a codec makes of their change."""

    def __init__(self, trainer: Trainer):
        kinds = {parameter.info.name: key for key, some in trainer.kinds.items() for parameter in some}
        held: dict[tuple, list[torch.Tensor]] = {}
        for h in trainer.optimizer.held:
            held.setdefault(kinds[h.parameter.name], []).append(h.master)
        served = [f for f in trainer.fragments if f.what == PARAMETERS]
        self.fragments: list[Fragment] = [f for f in served if (f.units, f.kind) in held]
        self.views = [view for f in self.fragments for view in held[f.units, f.kind]]
        self.sizes = [sum(len(view) for view in held[f.units, f.kind]) for f in self.fragments]
        #: Where each of the optimizer's pieces lies among the values.
        self.places, at = {}, 0
        for view in self.views:
            self.places[view.data_ptr()] = at
            at += len(view)
        self.code, self.tensors = codec(self.fragments[0].codec), on_tensors(self.fragments[0].codec)
        self.dtype, self.device, self.seed = self.views[0].dtype, self.views[0].device, trainer.settings.seed
        width = self.dtype.itemsize
        self.model_bytes = width * sum(self.sizes)
        self.wire_bytes = [self.code.wire_bytes(size, width) for size in self.sizes]
        self.lost = self.values().mul_(0) if self.code.feedback else None

    def values(self) -> torch.Tensor:
        """A copy of all values."""
        return torch.cat([view.detach() for view in self.views])

    def take(self, values: torch.Tensor) -> None:
        """Put values in place of those held."""
        with torch.no_grad():
            for view, part in zip(self.views, values.split([len(view) for view in self.views])):
                view.copy_(part)

    def as_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """Values as they are sent whole."""
        return values.cpu().contiguous().view(torch.uint8)

    def of_bytes(self, body: torch.Tensor) -> torch.Tensor:
        """Values that were sent whole."""
        return body.view(self.dtype).to(self.device)

    def encoded(self, change: torch.Tensor, client: int, task: int) -> torch.Tensor:
        """The bytes of a change; what the codec loses of it goes with the next."""
        if self.lost is not None:
            change = change + self.lost
        wires = [
            self.tensors.encode(part.contiguous(), self._seed(client, task, number))
            for number, part in enumerate(change.split(self.sizes))
        ]
        wire = torch.cat([one.cpu() for one in wires])
        if self.lost is not None:
            self.lost = change - self.decoded(wire, client, task)
        return wire

    def decoded(self, wire: torch.Tensor, client: int, task: int) -> torch.Tensor:
        """The change that such bytes are."""
        parts = zip(wire.split(self.wire_bytes), self.sizes)
        return torch.cat(
            [
                self.tensors.decode(one.to(self.device), size, self.dtype, self._seed(client, task, number))
                for number, (one, size) in enumerate(parts)
            ]
        )

    def _seed(self, client: int, task: int, number: int) -> int:
        return int(np.random.SeedSequence((self.seed, client, task, number)).generate_state(1)[0])
