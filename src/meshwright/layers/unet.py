"""U-Nets of latent diffusion as pieces: residual blocks that know the step, projections, resampling, ends.

While images are made context-parallel ranks have rows of every map each (DistriFusion, Li et al., 2024, arXiv
2402.19481, section 4): a 3x3 convolution reads a row of each neighbour, and a group norm the sums of all ranks. Both
travel on the queue of the patches, so that a plan's ``stale=patches`` has them of the step before like keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import TYPE_CHECKING

import msgspec

from meshwright.layers.convolution import FeatureMaps, convolved, held, maps_of, normed
from meshwright.layers.convolution import rules as undivided
from meshwright.layers.kind import Flops, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, linear
from meshwright.spec.convolution import Convolution2d
from meshwright.spec.denoise import DENOISE
from meshwright.spec.unet import LatentNoise, LatentStem, MapConvolution, MapProjection, Resampling, TimedResidual
from meshwright.spec.workload import Train
from meshwright.work import Collective, Elementwise

if TYPE_CHECKING:
    from meshwright.plan import Plan

#: Sums of a group of channels that ranks add up, and their bytes: of values and of their squares, in fp32.
SUMS, SUM_BYTES = 2, 4.0


def _edges(c: Context, name: str, at: FeatureMaps, channels: int) -> list[Piece]:
    """One row of every map to each of a rank's neighbours, which its 3x3 convolution reads."""
    sides = min(2, c.plan.layout.cp - 1)
    if not sides:
        return []
    size = float(sides * at.images * at.width * channels * c.element)
    sent = Collective(op="send", num_bytes=size, group=_group(c))
    return [Piece(name=f"{name} edges", forward=sent, queue="cp")]


def _sums(c: Context, name: str, at: FeatureMaps, groups: int) -> list[Piece]:
    """The sums of each image's groups over all ranks that share it."""
    if c.plan.layout.cp == 1:
        return []
    total = Collective(op="all_reduce", num_bytes=at.images * groups * SUMS * SUM_BYTES, group=_group(c))
    return [Piece(name=f"{name} sums", forward=total, queue="cp")]


def _group(c: Context):
    return c.cp_outer if c.cp_outer.size > 1 else c.cp_inner


def _normed(c: Context, name: str, at: FeatureMaps, channels: int, groups: int) -> list[Piece]:
    """A group norm and SiLU, which keeps what it read; compiled they are one kernel."""
    size = float(at.places * channels * c.element)
    both = [*_sums(c, name, at, groups), normed(c, name, at, channels)]
    if c.plan.kernels.compile:
        return both
    forward, backward = (Elementwise(num_bytes=n * size, fused=True) for n in (2, 3))
    return [*both, Piece(name=f"{name} silu", forward=forward, backward=backward, saved=size)]


def _convolved(c: Context, name: str, spec: Convolution2d, at: FeatureMaps, **how: bool) -> list[Piece]:
    edges = _edges(c, name, at, spec.inputs) if spec.kernel > 1 else []
    return [*edges, convolved(c, name, spec, at, **how)]


def residual_pieces(c: Context, spec: TimedResidual) -> list[Piece]:
    """Both convolutions with what is before, between and behind them."""
    at, once, e = maps_of(c), c.sequences_only(), c.element
    read, made = float(at.places * spec.inputs * e), float(at.places * spec.outputs * e)
    first, second = spec.convolutions
    found: list[Piece] = []
    if spec.skip >= 0:
        beside = Elementwise(num_bytes=2 * read, fused=True)
        found.append(Piece(name="beside the skip", forward=beside, backward=beside))
    found += _normed(c, "group norm 1", at, spec.inputs, spec.groups)
    found += _convolved(c, "convolution 1", first, at)
    if spec.step:
        told = once.tokens * spec.step * e
        found += linear(once, "step", spec.outputs, spec.step, bias=True, saved=told, held=told)
    if spec.step and not c.plan.kernels.compile:
        spread = Elementwise(num_bytes=2 * made, fused=True)
        found.append(Piece(name="step added", forward=spread, backward=Elementwise(num_bytes=made, fused=True)))
    found += _normed(c, "group norm 2", at, spec.outputs, spec.groups)
    found += _convolved(c, "convolution 2", second, at)
    if spec.shortcut is not None:
        found.append(convolved(c, "shortcut", spec.shortcut, at, saved=False))
    passes = Elementwise(num_bytes=3 * made, fused=True)
    return [*found, Piece(name="residual", forward=passes, backward=Elementwise(num_bytes=3 * read, fused=True))]


def projection_pieces(c: Context, spec: MapProjection) -> list[Piece]:
    """Into the transformers of a map, behind a group norm; or out of them, and added."""
    at, inputs = maps_of(c), float(c.tokens * spec.channels * c.element)
    name = "projection in" if spec.enters else "projection out"
    product = linear(c, name, spec.channels, spec.channels, bias=True, saved=inputs, held=inputs)
    if spec.enters:
        return [*_sums(c, "group norm", at, spec.groups), normed(c, "group norm", at, spec.channels), *product]
    passes = Elementwise(num_bytes=3 * inputs, fused=True)
    return [*product, Piece(name="map residual", forward=passes, backward=passes)]


def resampling_pieces(c: Context, spec: Resampling) -> list[Piece]:
    """The convolution, behind maps that are written four times as large where they go up."""
    at, channels = maps_of(c), spec.channels
    if not spec.up:
        return _convolved(c, "downsampling", spec.convolution, at)
    larger = FeatureMaps(at.images, 2 * at.height, 2 * at.width)
    moved = Elementwise(num_bytes=float((at.places + larger.places) * channels * c.element), fused=True)
    repeated = Piece(name="repeat places", forward=moved, backward=moved)
    return [repeated, *_convolved(c, "upsampling", spec.convolution, larger)]


def convolution_pieces(c: Context, spec: MapConvolution) -> list[Piece]:
    """The convolution, behind its norm and before its SiLU; what it leaves is added to what is there, or stands for
    itself."""
    at = maps_of(c)
    found = _normed(c, "group norm", at, spec.inputs, spec.groups) if spec.groups else []
    found += _convolved(c, "convolution", spec.convolution, at, to_input=not spec.reads_data)
    if spec.silu and not c.plan.kernels.compile:
        size = float(at.shrunk(spec.stride).places * spec.outputs * c.element)
        forward, backward = (Elementwise(num_bytes=n * size, fused=True) for n in (2, 3))
        found.append(Piece(name="silu", forward=forward, backward=backward, saved=size))
    return found


def stem_pieces(c: Context, spec: LatentStem) -> list[Piece]:
    """The convolution of the latents, which have no gradient, and the products of each image's vectors."""
    once, found = c.sequences_only(), _convolved(c, "latents", spec.convolution, maps_of(c), to_input=False)
    for number, (k, n) in enumerate(spec.products, 1):
        inputs = once.tokens * k * c.element
        found += linear(once, f"step {number}", n, k, bias=True, saved=inputs, held=inputs)
    return found


def noise_pieces(c: Context, spec: LatentNoise) -> list[Piece]:
    """The last convolution, and the squared error in fp32."""
    at = maps_of(c)
    out = float(at.places * spec.outputs)
    loss = Piece(
        name="squared error",
        forward=Elementwise(num_bytes=out * (c.element + 8.0), kernels=2),
        backward=Elementwise(num_bytes=out * (8.0 + c.element)),
        saved=out * 4.0,
    )
    normed_maps = _normed(c, "last group norm", at, spec.channels, spec.groups)
    return [*normed_maps, *_convolved(c, "noise", spec.convolution, at), loss]


def _places(tokens: Tokens) -> int:
    return isqrt(tokens.items[0][0].new_tokens) ** 2 * tokens.rows


def residual_flops(spec: TimedResidual, tokens: Tokens) -> Flops:
    """Both convolutions of every place, the shortcut's, and the step's product of every image."""
    every = [*spec.convolutions, *([spec.shortcut] if spec.shortcut is not None else [])]
    places = sum(one.products(_places(tokens)) for one in every)
    return Flops(weights=2 * (places + spec.step * spec.outputs * tokens.rows))


def convolution_flops(spec: MapConvolution, tokens: Tokens) -> Flops:
    """The convolution of all places that it makes."""
    return Flops(weights=2 * spec.convolution.products(_places(tokens) // spec.stride**2))


def projection_flops(spec: MapProjection, tokens: Tokens) -> Flops:
    """Every place multiplies the matrix."""
    return Flops(weights=2 * spec.channels**2 * _places(tokens))


def resampling_flops(spec: Resampling, tokens: Tokens) -> Flops:
    """The convolution of all places that it makes."""
    places = _places(tokens) * 4 if spec.up else _places(tokens) // 4
    return Flops(weights=2 * spec.convolution.products(places))


def stem_flops(spec: LatentStem, tokens: Tokens) -> Flops:
    """The convolution of all latents, and the products of every image."""
    once = sum(k * n for k, n in spec.products) * tokens.rows
    return Flops(weights=2 * (spec.convolution.products(_places(tokens)) + once))


def noise_flops(spec: LatentNoise, tokens: Tokens) -> Flops:
    """The convolution of all places."""
    return Flops(weights=2 * spec.convolution.products(_places(tokens)))


def rules(spec: msgspec.Struct, plan: Plan, train: Train) -> Iterator[tuple[str, ...]]:
    """Yield what U-Nets are not cut by: rows of an image are ranks' own while images are made alone."""
    alone = train.phase == DENOISE and plan.layout.cp > 1
    whole = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, cp=1)) if alone else plan
    yield from undivided(spec, whole, train)


KINDS = (
    Kind(
        name="timed residual",
        record=TimedResidual,
        pieces=residual_pieces,
        params=held,
        flops=residual_flops,
        rules=rules,
    ),
    Kind(
        name="map projection",
        record=MapProjection,
        pieces=projection_pieces,
        params=held,
        flops=projection_flops,
        rules=rules,
    ),
    Kind(
        name="resampling", record=Resampling, pieces=resampling_pieces, params=held, flops=resampling_flops, rules=rules
    ),
    Kind(
        name="map convolution",
        record=MapConvolution,
        pieces=convolution_pieces,
        params=held,
        flops=convolution_flops,
        rules=rules,
    ),
    Kind(name="latent stem", record=LatentStem, pieces=stem_pieces, params=held, flops=stem_flops, rules=rules),
    Kind(name="latent noise", record=LatentNoise, pieces=noise_pieces, params=held, flops=noise_flops, rules=rules),
)
