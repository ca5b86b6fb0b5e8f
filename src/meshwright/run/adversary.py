"""Adversarial steps whose perturbation is found a step before (ConAdv, Liu et al. 2021, 2106.00221).

A step's loss is the mean of its text's and of the same text's with moved embeddings. Each sequence is moved along the
gradient of its loss with respect to its embeddings, by a part of their length (Miyato et al. 2016, 1605.07725, have an
absolute one). That gradient is by the weights of the step before: the pass that finds it begins when a step's own
passes are over, beside the sums of gradients, and nothing waits for it but the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from meshwright.lower import order
from meshwright.run.collect import all_reduce
from meshwright.run.parts import Pass
from meshwright.run.pieces import PERTURBATION, Parameter, Part, TensorPiece

if TYPE_CHECKING:
    from meshwright.run.mesh import ProcessMesh
    from meshwright.run.pipeline import RankPipeline
    from meshwright.run.trainer import Trainer


class Adversary:
    """The move of the next step's embedded text: a ``part`` of its length, found by the passes of `pipeline`,
    which end at the inputs. ``ready``: it is found."""

    def __init__(
        self, pipeline: RankPipeline, mesh: ProcessMesh, part: float, count: int, states: torch.Tensor, sharded: bool
    ):
        """`count`: microbatches; `states`: as hidden states [tokens of a rank, sequences of a microbatch, hidden] of
        one are; `sharded`: tokens are divided among tensor-parallel ranks."""
        self.pipeline, self.mesh, self.part, self.ready = pipeline, mesh, part, False
        self.groups = [mesh["cp"], *([mesh["tp"]] if sharded else [])]
        embeds = any(stage.embedding is not None for stage in pipeline.stages.values())
        self.values = states.new_zeros((count, *states.shape)) if embeds else None
        self.leaves: dict[int, torch.Tensor] = {}

    def both(self, passes: Sequence[Pass]) -> list[Pass]:
        """A step's passes: those of its text, then those of moved text, each half of the loss."""
        halves = [p._replace(scale=p.scale / 2) for p in passes]
        return [*halves, *(p._replace(moved=self._moved(number)) for number, p in enumerate(halves))]

    def find(self, passes: Sequence[Pass], before_write: Callable[[], None]) -> None:
        """Find what these passes' text is moved by in the next step, by the weights as they are."""
        weights = [p for stage in self.pipeline.stages.values() for p in stage.parameters() if p.requires_grad]
        for weight in weights:
            weight.requires_grad_(False)
        try:
            self.pipeline.run([p._replace(moved=self._leaf(n), step=p.step + 1) for n, p in enumerate(passes)])
        finally:
            for weight in weights:
                weight.requires_grad_(True)
        if self.values is not None:
            before_write()  # a checkpoint may still read what was found before
            for number in sorted(self.leaves):
                leaf = self.leaves.pop(number)
                self.values[number].copy_(self._along(leaf.grad, leaf.detach()))
        self.ready = True

    def pieces(self) -> list[TensorPiece]:
        """The moves that are found, as a part of a checkpoint that as many ranks go on with."""
        if self.values is None:
            return []
        values = self.values.view(-1)
        size, name = len(values), f"perturbation-{self.mesh.rank}"
        parameter = Parameter(name, (size,), (Part(name, (size,), (0,), (slice(0, size),)),))
        return [TensorPiece(PERTURBATION, parameter, 0, size, values, True)]

    def _moved(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + self.values[number]

    def _leaf(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def begin(x: torch.Tensor) -> torch.Tensor:
            self.leaves[number] = x.detach().requires_grad_()
            return self.leaves[number]

        return begin

    def _along(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A part of the length of each sequence of x [s, b, hidden] along its gradient; 0 where it has none."""
        exact = torch.promote_types(gradient.dtype, torch.float32)
        squares = torch.stack([one.to(exact).square().sum((0, 2)) for one in (x, gradient)])
        for group in self.groups:
            if not group.alone:
                squares = all_reduce(squares, group, queue=group.name)
        length, slope = squares.sqrt()
        scale = torch.where(slope > 0, self.part * length / slope.clamp_min(torch.finfo(exact).tiny), 0.0)
        return gradient * scale.to(gradient.dtype).view(1, -1, 1)


def opposed(trainer: Trainer, part: float) -> Adversary | None:
    """Return what moves a trainer's text by a part of its embeddings' length, along gradients by the weights of the
    step before; None where nothing does."""
    if not part:
        return None
    layout, count = trainer.plan.layout, trainer.plan.num_microbatches(trainer.train.global_batch)
    ends = trainer.pipeline_of(order(trainer.plan, count, trainer.schedule_params).to_inputs(), due=False)
    return Adversary(ends, trainer.mesh, part, count, trainer.hidden_states(), layout.sp and layout.tp > 1)
