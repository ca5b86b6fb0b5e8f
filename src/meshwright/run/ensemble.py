"""The noise that an ensemble of experts finds: each one's, weighed by a router that sees the noisy image and its step.

Of data that are a mixture of clusters the noise that is expected given a noisy sample is the mean of what is expected
given the sample and its cluster, weighed by the probability of each cluster given the sample (decentralised diffusion
models, McAllister et al., 2501.05450). An expert learns the latter on its cluster alone, a router the weights: both
without any message between them. Where an image passes the experts that weigh most alone, their weights are made one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from meshwright.run import noise
from meshwright.run.collect import sum_over
from meshwright.run.model import Stage
from meshwright.run.pieces import alike
from meshwright.run.weights import load_weights
from meshwright.spec import naming
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from meshwright.run.images import ImageRank


def weighed(logits: torch.Tensor, active: int) -> torch.Tensor:
    """The weights [b, experts] of a router's logits, those of the `active` largest of each sample alone, which sum to
    one."""
    found = logits.softmax(-1)
    most, which = found.topk(active, -1)
    return torch.zeros_like(found).scatter(-1, which, most / most.sum(-1, keepdim=True))


def mixed(
    x: torch.Tensor, weights: torch.Tensor, experts: Mapping[int, Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """The sum of what some of the experts, by number, have found for samples [b, ...], in their weights [b, experts].
    An expert is called with the numbers of the samples that it counts for, and by nobody where there are none."""
    total = torch.zeros_like(x)
    for number, finds in experts.items():
        mine = weights[:, number].nonzero().flatten()
        if len(mine):
            total[mine] += weights[mine, number].view(-1, *(1,) * (x.dim() - 1)) * finds(mine)
    return total


class RankExperts:
    """The experts that a rank holds, of a job's ensemble, and its router."""

    def __init__(self, rank: ImageRank, folders: tuple[str, ...]):
        """`folders`: weights of all experts of the job."""
        job, dp = rank.job, rank.mesh["dp"]
        self.rank, held = rank, job.denoise.experts // dp.size
        self.router = job.denoise.router_model(job.model)
        #: Numbers of the experts here.
        self.own = range(dp.index * held, (dp.index + 1) * held)
        self.stages = [self._loaded(job.model, folders[number]) for number in self.own]
        self.tells = self._loaded(self.router, job.denoise.router)
        #: How many of them an image passes.
        self.active = job.denoise.experts
        #: Bytes that this rank brings into a step's sum over ranks.
        self.sent_bytes = 0

    def _loaded(self, model: Model, folder: str) -> Stage:
        rank = self.rank
        train = rank.job.denoise.train(model)
        shared = rank.shared._replace(model=model, names=naming.names(model), train=train)
        layers = tuple(range(model.num_layers))
        stage = Stage(shared, 0, layers, ("none",) * len(layers), first=True, last=True)
        place = rank.mesh
        load_weights(folder, alike([stage], place), model, place["world"], device=place.device)
        return stage

    def weights(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """The weight of each expert for the patches of images [b, s, channels, side, side], [b, experts]."""
        rank, router = self.rank, self.router
        spec, frames = rank.job.model.embedding, rank.train.frames
        cut = noise.patches(noise.whole(x, spec.patch, frames), router.embedding.patch)
        steps = torch.full((len(x),), step, device=x.device)
        told, tokens = torch.zeros_like(steps), torch.arange(cut.shape[1], device=x.device)
        hidden = rank.hidden(self.tells, self.tells.embedding.entered(cut, steps, told, tokens), tokens)
        return weighed(self.tells.head.logits(hidden), self.active)

    def noise(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """The noise of the images, with guidance, as all ranks' experts find it; collective."""
        rank, said = self.rank, self.rank.job.denoise

        def finds(stage: Stage, mine: torch.Tensor) -> torch.Tensor:
            rows = torch.cat((mine, mine + said.images)) if said.guidance else mine
            steps = torch.full((len(rows),), step, device=x.device)
            hidden = stage.embedding.entered(x[rows % said.images], steps, rank.told[rows], rank.tokens)
            return rank.guided(rank.found(stage, hidden))

        experts = {number: partial(finds, stage) for number, stage in zip(self.own, self.stages, strict=True)}
        total = mixed(x, self.weights(x, step).to(x.dtype), experts)
        dp = rank.mesh["dp"]
        if dp.size == 1:
            return total
        self.sent_bytes = total.nbytes
        return sum_over(total, dp)
