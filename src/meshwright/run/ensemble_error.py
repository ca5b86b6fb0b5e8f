"""The mean squared error of the noise that a model, or an ensemble with its router, finds in samples at steps of the
noise that lie evenly: what either is trained for, judged in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.run import noise
from meshwright.run.data.samples import LabelledSamples
from meshwright.run.images import ImageRank, ImagesJob
from meshwright.run.mesh import alone
from meshwright.run.world import World
from meshwright.spec.diffusion import NOISE_STEPS


def errors(
    world: World, jobs: Sequence[ImagesJob], actives: Sequence[int], held: LabelledSamples, steps: int
) -> list[float]:
    """Return for each job the error over all samples held out, in so many steps of the noise; `actives`: how many
    experts of an ensemble a sample passes. Jobs are of one rank, of models without classes, and of as many images as
    there are samples; `world` is that one."""
    count = held.num_sequences - held.padding
    samples = held.judged(held.chosen[:count]).sequences_at(torch.arange(count).numpy()).tokens.double()
    found = []
    for job, active in zip(jobs, actives, strict=True):
        rank, lost = ImageRank(job, alone(device=world.device)), 0.0
        if rank.experts is not None:
            rank.experts.active = active
        for number in range(steps):
            step = (2 * number + 1) * NOISE_STEPS // (2 * steps)
            drawn = noise.drawn(tuple(samples.shape), torch.arange(count), number, 0, count)
            said = drawn._replace(steps=torch.full((count,), step))
            patch = job.model.embedding.patch
            x = noise.patches(noise.noisy(samples, said), patch)
            with torch.no_grad():
                if rank.experts is not None:
                    guess = rank.experts.noise(x, step)
                else:
                    guess = rank.through(rank.entered(x, step))
            lost += float((guess - noise.patches(said.noise.double(), patch)).square().mean()) / steps
        found.append(lost)
    return found
