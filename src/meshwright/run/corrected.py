"""Steps along a direction that each batch's gradients correct: ``g <- g + grad(x) - grad(x before)`` on the same batch
(SARAH, Nguyen et al. 1703.00102; in clients' steps FedAMD, Wu et al. 2206.05891)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.run.data import Batch
from meshwright.run.result import StepResult
from meshwright.run.trainer import Trainer

if TYPE_CHECKING:
    from meshwright.run.flat import Flat


class CorrectedSteps:
    """Steps of a trainer from a direction on, over `flat` values in one order; ``directed`` from :meth:`begin` to
    :meth:`end`. The first step goes along the direction itself: both of its gradients are the same."""

    def __init__(self, trainer: Trainer, flat: Flat):
        self.trainer, self.flat = trainer, flat
        self.direction: torch.Tensor | None = None
        self.before: torch.Tensor | None = None
        self._there: torch.Tensor | None = None
        trainer.before_update.append(self._correct)

    @property
    def directed(self) -> bool:
        """Whether steps are corrected."""
        return self.direction is not None

    def begin(self, direction: torch.Tensor) -> None:
        """Take the next steps from this direction on."""
        self.direction, self.before = direction.clone(), None

    def end(self) -> None:
        """Take steps along their own gradients again."""
        self.direction = self.before = None

    def gradient(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """Return the mean loss of a batch and its gradient, where the trainer stands."""
        trainer = self.trainer
        total = trainer._gradients(trainer.passes(batch))
        return float(total), self._gathered()

    def step(self, batch: Batch) -> StepResult:
        """One step, whose batch is passed where the one before began as well."""
        flat, here = self.flat, self.flat.values()
        if self.before is not None:
            flat.take(self.before)
            self.trainer.publish()
        _, self._there = self.gradient(batch)
        if self.before is not None:
            flat.take(here)
            self.trainer.publish()
        self.before = here
        return self.trainer.step(batch)

    def _gathered(self) -> torch.Tensor:
        """The gradient in the order of the flat values."""
        out = torch.empty_like(self.flat.values())
        for held, place in self._held():
            out[place : place + len(held.master)] = held.gradient.to(out.dtype)
        return out

    def _correct(self) -> None:
        """Put the corrected direction in place of the step's gradient."""
        if self.direction is None:
            return
        self.direction += self._gathered() - self._there
        for held, place in self._held():
            held.gradient.copy_(self.direction[place : place + len(held.master)])

    def _held(self):
        for held in self.trainer.optimizer.held:
            yield held, self.flat.places[held.master.data_ptr()]
