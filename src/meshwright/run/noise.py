"""The noise of a diffusion model: how much of it a step has, what is drawn for each sample, and samples as patches.

The schedule is that of Ho et al. (2020, 2006.11239, section 4), as DiT takes it (Peebles and Xie, 2212.09748, section
4): 1,000 steps, whose variances rise linearly from 1e-4 to 0.02. What is drawn depends on the seed, the step of the run
and the sample's place in the global batch, and not on the plan.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

import torch

from meshwright.spec.diffusion import NOISE_STEPS, Denoised

#: The variance of the noise in its first step and in its last.
FIRST, LAST = 1e-4, 0.02
#: Samples of which the class is not told while a model is trained, so that it also learns what all samples have in
#: common (classifier-free guidance, Ho and Salimans, 2207.12598; the share is DiT's).
UNTOLD = 0.1
#: The step of a run whose samples have no noise, and are of no class: what their hidden states tell apart is theirs.
CLEAN = -2
#: The slowest of the waves that a step, or a place, is written in.
SLOWEST = 10_000.0


class NoiseDraws(NamedTuple):
    """The draws of some samples: ``steps`` int64 [b] of the noise, the ``noise`` in the shape of the samples in fp32,
    and bool [b] of whose class is not told."""

    steps: torch.Tensor
    noise: torch.Tensor
    untold: torch.Tensor


@cache
def kept() -> torch.Tensor:
    """The part of the variance that the sample itself has after each step of the noise, float64 [1000]."""
    return (1 - torch.linspace(FIRST, LAST, NOISE_STEPS, dtype=torch.float64)).cumprod(0)


def drawn(shape: tuple[int, ...], rows: torch.Tensor, seed: int, step: int, batch: int) -> NoiseDraws:
    """The draws for samples of a shape [b, ...], whose places in a global batch of `batch` are `rows` int64 [b].
    Where nothing is trained (`step` below 0) classes are told, and steps of the noise lie evenly over all of them; in
    the step :data:`CLEAN` there is no noise, and none is told its class."""
    if step == CLEAN:
        none = torch.zeros(shape, device=rows.device)
        return NoiseDraws(torch.zeros_like(rows), none, torch.ones_like(rows, dtype=torch.bool))
    steps, noise, untold = [], [], []
    for row in rows.tolist():
        digest = hashlib.sha256(f"noise:{seed if step >= 0 else 0}:{max(step, -1)}:{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        steps.append(torch.randint(NOISE_STEPS, (), generator=generator))
        untold.append(torch.rand((), generator=generator) < UNTOLD)
        noise.append(torch.randn(shape[1:], generator=generator))
    found = NoiseDraws(*(torch.stack(some).to(rows.device) for some in (steps, noise, untold)))
    if step >= 0:
        return found
    even = (2 * (rows % batch) + 1) * NOISE_STEPS // (2 * batch)
    return found._replace(steps=even, untold=torch.zeros_like(found.untold))


def latent_noise(shape: tuple[int, ...], rows: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """The noise that an encoder's latents of a shape [b, ...] are drawn with, of images at the places `rows` of a
    global batch; fp32. The same for all steps below 0, where nothing is trained."""
    found = []
    for row in rows.tolist():
        digest = hashlib.sha256(f"latent:{seed if step >= 0 else 0}:{max(step, -1)}:{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found.append(torch.randn(shape[1:], generator=generator))
    return torch.stack(found).to(rows.device)


def noisy(samples: torch.Tensor, found: NoiseDraws) -> torch.Tensor:
    """Samples with the noise of their steps, in 32 bits at least."""
    kind = torch.promote_types(samples.dtype, torch.float32)
    share = kept().to(samples.device)[found.steps].view(-1, *(1,) * (samples.dim() - 1))
    return (share.sqrt() * samples.to(torch.float64) + (1 - share).sqrt() * found.noise.to(torch.float64)).to(kind)


def patches(samples: torch.Tensor, side: int) -> torch.Tensor:
    """Samples [b, (frames,) channels, height, width] as patches [b, s, channels, side, side], frame by frame and row
    by row."""
    some = samples if samples.dim() == 5 else samples.unsqueeze(1)
    b, f, c, h, w = some.shape
    cut = some.reshape(b, f, c, h // side, side, w // side, side).permute(0, 1, 3, 5, 2, 4, 6)
    return cut.reshape(b, -1, c, side, side)


def whole(some: torch.Tensor, side: int, frames: int) -> torch.Tensor:
    """The samples that :func:`patches` cut, of so many frames (0: images)."""
    b, s, c = some.shape[:3]
    rows = round((s // max(1, frames)) ** 0.5)
    out = some.reshape(b, max(1, frames), rows, rows, c, side, side).permute(0, 1, 4, 2, 5, 3, 6)
    out = out.reshape(b, max(1, frames), c, rows * side, rows * side)
    return out if frames else out[:, 0]


def as_found(some: torch.Tensor) -> torch.Tensor:
    """Patches [..., channels, side, side] as the last layer of DiT writes them: places first, then channels."""
    return some.movedim(-3, -1).flatten(-3)


def from_found(some: torch.Tensor, spec: Denoised, channels: int) -> torch.Tensor:
    """Patches [..., channels, side, side] of what the last layer has written, of its first channels."""
    cut = some.unflatten(-1, (spec.patch, spec.patch, spec.channels))
    return cut.movedim(-1, -3)[..., :channels, :, :]


def waves(places: torch.Tensor, width: int, *, cosines_first: bool = False) -> torch.Tensor:
    """Sines and cosines of numbers [n] in waves of rising length, float64 [n, width] (Vaswani et al., 1706.03762)."""
    rates = SLOWEST ** (-torch.arange(width // 2, dtype=torch.float64, device=places.device) / (width // 2))
    turned = places.to(torch.float64).unsqueeze(-1) * rates
    pair = (turned.cos(), turned.sin()) if cosines_first else (turned.sin(), turned.cos())
    return torch.cat(pair, -1)


@cache
def positions(count: int, hidden: int) -> torch.Tensor:
    """The fixed table of the places of a square of so many patches, float64 [count, hidden]: columns in the first
    half, rows in the second, as DiT's authors have them."""
    side = round(count**0.5)
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.cat([waves(one.flatten(), hidden // 2) for one in (column, row)], -1)
