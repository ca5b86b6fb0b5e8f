"""A pruned model between a server and its clients, and steps of clients on it (FedDIP, Long et al. 2309.06805).

A step's gradient is that of the masked values, whose loss has a penalty on the length of each matrix, and is taken by
all values (error feedback): those that the mask leaves out may come back. The server averages them, and cuts.
"""

from __future__ import annotations

import numpy as np
import torch

from meshwright.run.data import Batch
from meshwright.run.flat import Flat
from meshwright.run.result import StepResult
from meshwright.run.trainer import Trainer
from meshwright.sync.fragments import VECTOR
from meshwright.sync.pruning import Pruning, drawn


class PrunedModel:
    """The values of a model of which a mask keeps some: bool tensors over `flat` values; vectors are kept whole."""

    def __init__(self, trainer: Trainer, flat: Flat, pruning: Pruning):
        self.flat, self.pruning = flat, pruning
        kinds = [torch.full((size,), f.kind != VECTOR) for f, size in zip(flat.fragments, flat.sizes)]
        #: Which values are of matrices, and where each matrix lies.
        self.prunable = torch.cat(kinds).to(flat.device)
        self.matrices = self._matrices(trainer)
        self.mask: torch.Tensor | None = None

    def _matrices(self, trainer: Trainer) -> list[tuple[int, tuple[int, ...]]]:
        """The place and shape of each matrix, in the order of the values."""
        found = [(self.flat.places[h.master.data_ptr()], h.parameter.shape) for h in trainer.optimizer.held]
        return sorted((place, tuple(shape)) for place, shape in found if bool(self.prunable[place]))

    def body(self, values: torch.Tensor, number: int, told: bool) -> torch.Tensor:
        """Return the bytes of a round's model: its values that are kept, and the mask where a client is told it."""
        if self.pruning.mask_of(number) < 0:
            return self.flat.as_bytes(values)
        sent = self.flat.as_bytes(values[~self.prunable | self.mask])
        bits = np.packbits(self.mask[self.prunable].cpu().numpy()) if told else np.zeros(0, np.uint8)
        return torch.cat((sent, torch.from_numpy(bits)))

    def values(self, body: torch.Tensor, number: int, seed: tuple[int, ...]) -> torch.Tensor:
        """Return the model that a client gets for a round, whose mask it then has: that which it is told, the one
        before, or, in the first round, one that it draws with this seed."""
        flat, mask = self.flat, self.pruning.mask_of(number)
        if mask < 0:
            one = drawn([shape for _, shape in self.matrices], 1 - self.pruning.first, seed)
            self._take(torch.from_numpy(one))
            return flat.of_bytes(body)
        count = int(self.prunable.sum())
        size = self.pruning.sent(mask, False, count, len(self.prunable) - count, flat.dtype.itemsize)
        if len(body) > size:
            self._take(torch.from_numpy(np.unpackbits(body[size:].numpy(), count=count).astype(bool)))
        out = torch.zeros(len(self.prunable), dtype=flat.dtype, device=flat.device)
        out[~self.prunable | self.mask] = flat.of_bytes(body[:size].clone())
        return out

    def _take(self, kept: torch.Tensor) -> None:
        """Take a mask of the matrices' values."""
        self.mask = torch.zeros_like(self.prunable)
        self.mask[self.prunable] = kept.to(self.prunable.device)

    def cut(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Return the server's model at the end of a round, as the mask leaves it, which is cut if it is due."""
        if self.mask is not None:
            values = self.masked(values)
        if number % self.pruning.every == 0:
            large = values[self.prunable].abs()
            kept = torch.zeros_like(large, dtype=torch.bool)
            kept[torch.topk(large, self.pruning.kept(number, len(large))).indices] = True
            self._take(kept)
            values = self.masked(values)
        return values

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """Return values with zeros where the mask leaves them out."""
        return values * (~self.prunable | self.mask)


class PrunedSteps:
    """Steps of a client on a pruned model."""

    def __init__(self, trainer: Trainer, model: PrunedModel):
        self.trainer, self.model, self.strength = trainer, model, 0.0
        self._dense: torch.Tensor | None = None
        self._at: torch.Tensor | None = None
        trainer.before_update.append(self._restored)

    def step(self, batch: Batch, number: int) -> StepResult:
        """One step of a round: the gradient of the masked values, taken by all."""
        flat = self.model.flat
        self.strength, self._dense = self.model.pruning.strength(number), flat.values()
        self._at = self.model.masked(self._dense)
        flat.take(self._at)
        self.trainer.publish()
        result = self.trainer.step(batch)
        if not result.updated:
            flat.take(self._dense)
        return result

    def _restored(self) -> None:
        """Put all values back before the update, and add the penalty's gradient."""
        self.model.flat.take(self._dense)
        places = {place for place, _ in self.model.matrices}
        for held in self.trainer.optimizer.held if self.strength else ():
            place = self.model.flat.places[held.master.data_ptr()]
            if place in places:
                here = self._at[place : place + len(held.master)]
                held.gradient.add_((here / here.norm()).to(held.gradient.dtype), alpha=self.strength)
