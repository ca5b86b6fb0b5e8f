"""Convolutions as pieces: implicit matrix products, batch norms, activations, poolings and additions over feature maps.

A convolution is three products (Chetlur et al., 2014, cuDNN, arXiv 1410.0759, section 3), priced as any other: its
forward multiplies places by taps and weights, its input gradient the places of the gradient by the same taps, and its
weight gradient taps by places. Neither the taps of a place nor the places of a tap are written to memory: what is read
is the map. A stride cuts the input gradient into products of the taps that meet. One channel by itself is no product:
it takes the bytes of its maps. Norms and activations move theirs; where kernels are compiled an activation is in the
kernel before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import TYPE_CHECKING

import msgspec

from meshwright.layers.head import loss
from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, linear
from meshwright.spec.convolution import SQUARE, Convolution2d, ConvolutionPath, ImageClassifier, ImageStem
from meshwright.spec.workload import DTYPE_BYTES, Train
from meshwright.work import Elementwise, Gemm

if TYPE_CHECKING:
    from meshwright.plan import Plan

#: Bytes of an index of a maximum, which its backward reads (torch's are of 64 bits).
INDEX_BYTES = 8.0


class FeatureMaps(msgspec.Struct, frozen=True):
    """The maps of a microbatch on one rank: ``images`` of ``height`` x ``width`` places."""

    images: int
    height: int
    width: int

    @property
    def places(self) -> int:
        """Places of all images."""
        return self.images * self.height * self.width

    def shrunk(self, stride: int) -> FeatureMaps:
        """Return the maps that every `stride`-th place makes."""
        return FeatureMaps(self.images, -(-self.height // stride), -(-self.width // stride))


def maps_of(c: Context) -> FeatureMaps:
    """Return the maps of the stream that a context is of; context-parallel ranks have so many rows each."""
    side = isqrt(c.seq_len)
    return FeatureMaps(c.plan.pipeline.microbatch, -(-side // c.plan.layout.cp), side)


def image_of(c: Context) -> FeatureMaps:
    """Return the images themselves, as the workload has them."""
    side = isqrt(c.workload[0][0].new_tokens)
    return FeatureMaps(c.plan.pipeline.microbatch, side, side)


def convolved(
    c: Context, name: str, spec: Convolution2d, at: FeatureMaps, *, to_input: bool = True, saved: bool = True
) -> Piece:
    """A convolution of maps `at`; `to_input` is whether they have a gradient, `saved` whether this convolution is the
    one that keeps them for its weight gradient."""
    out, e = at.shrunk(spec.stride), c.element
    read, made = float(at.places * spec.inputs * e), float(out.places * spec.outputs * e)
    kept = {"saved": read, "held": read} if saved else {"working": read}
    if spec.depthwise:
        both = Elementwise(num_bytes=read + made, fused=True)
        return Piece(name=name, forward=both, backward=both if to_input else None, weight=both, gradient=made, **kept)
    inputs, outputs, grads = spec.inputs // spec.groups, spec.outputs // spec.groups, c.plan.precision.grads
    taps, sizes = inputs * spec.taps, {"batch": spec.groups, "dtype": c.dtype}
    share = min(1.0, at.places / (out.places * spec.taps))
    meet = min(spec.stride**2, spec.taps)  # products that a stride makes of one, over the taps of their own
    back = Gemm(
        m=out.places * meet,
        n=inputs,
        k=-(-outputs * spec.taps // meet),
        read=min(1.0, 1.0 / spec.taps),
        out_bytes=e,
        **sizes,
    )
    weight = Gemm(
        m=taps,
        n=outputs,
        k=out.places,
        read=share,
        out_bytes=4.0 if grads == "fp32" else 2.0,
        accumulate=True,
        bias="summed" if spec.bias else "",
        **sizes,
    )
    bias = "added" if spec.bias else ""
    return Piece(
        name=name,
        forward=Gemm(m=out.places, n=outputs, k=taps, read=share, out_bytes=e, bias=bias, **sizes),
        backward=back if to_input else None,
        weight=weight,
        gradient=made,
        outputs=(made,),
        **kept,
    )


def normed(c: Context, name: str, at: FeatureMaps, channels: int, *, kernels: int = 1) -> Piece:
    """A norm over maps with statistics of its own: maps are read for these and again to be scaled; the backward reads
    maps and gradients for two sums, and again for the result."""
    size = float(at.places * channels * c.element)
    return Piece(
        name=name,
        forward=Elementwise(num_bytes=3 * size, kernels=kernels, fused=True),
        backward=Elementwise(num_bytes=5 * size, kernels=kernels, fused=True),
        saved=size,
    )


def activated(c: Context, name: str, at: FeatureMaps, channels: int, *, behind: bool) -> list[Piece]:
    """A ReLU in place: what it leaves is what the next convolution keeps. Compiled and `behind` a kernel of another
    kind it is in that one, and its backward asks the sign of what is computed again."""
    if c.plan.kernels.compile and behind:
        return []
    size = float(at.places * channels * c.element)
    forward = None if c.plan.kernels.compile else Elementwise(num_bytes=2 * size, fused=True)
    return [Piece(name=name, forward=forward, backward=Elementwise(num_bytes=3 * size, fused=True))]


def added(c: Context, name: str, at: FeatureMaps, channels: int, entered: float) -> Piece:
    """The sum with what came in, whose gradient, of `entered` bytes, is the sum of those of both ways."""
    size = float(at.places * channels * c.element)
    passes = 1 if c.plan.kernels.compile else 3  # the norm before it reads what came in as it writes
    return Piece(
        name=name,
        forward=Elementwise(num_bytes=passes * size, kernels=0 if c.plan.kernels.compile else 1, fused=True),
        backward=Elementwise(num_bytes=3 * entered, fused=True),
    )


def pooled(c: Context, name: str, at: FeatureMaps, channels: int, stride: int) -> Piece:
    """The largest of the places that a window of each `stride` sees, with its index; what it read, which no
    convolution keeps, the ReLU before it does."""
    read = float(at.places * channels * c.element)
    made = at.shrunk(stride).places * channels
    moved = Elementwise(num_bytes=read + made * (c.element + INDEX_BYTES), fused=True)
    return Piece(name=name, forward=moved, backward=moved, saved=read + made * INDEX_BYTES)


def path_pieces(c: Context, spec: ConvolutionPath, *, at: FeatureMaps | None = None) -> list[Piece]:
    """Convolutions in order with norm and ReLU behind each, the last ReLU behind the sum with what came in; pooling
    behind it. `at`: images come in, which have no gradient."""
    first, begin = at is not None, at or maps_of(c)
    now, found = begin, []
    for number, one in enumerate(spec.convolutions, 1):
        found.append(convolved(c, f"convolution {number}", one, now, to_input=not first or number > 1))
        now = now.shrunk(one.stride)
        found += [normed(c, f"batch norm {number}", now, one.outputs)] if spec.norm else []
        if number < len(spec.convolutions) or not spec.added:
            found += activated(c, f"relu {number}", now, one.outputs, behind=bool(spec.norm))
    width = spec.convolutions[-1].outputs
    if spec.added:
        if spec.shortcut is not None:
            found.append(convolved(c, "shortcut", spec.shortcut, begin, saved=False))
            found += [normed(c, "shortcut norm", now, width)] if spec.norm else []
        entered = float(begin.places * spec.convolutions[0].inputs * c.element)
        found += [added(c, "residual", now, width, entered)]
        found += activated(c, "relu", now, width, behind=bool(spec.norm))
    if spec.pooled:
        found.append(pooled(c, "pooling", now, width, spec.pooled))
    return found


def stem_pieces(c: Context, spec: ImageStem) -> list[Piece]:
    """Return the pieces of the path on the images."""
    return path_pieces(c, spec.path, at=image_of(c))


def classifier_pieces(c: Context, spec: ImageClassifier) -> list[Piece]:
    """The average of all places, which keeps the last ReLU's result; linear layers of each image; the loss."""
    at, size = c.sequences_only(), maps_of(c).places * c.hidden * c.element
    mean = Elementwise(num_bytes=float(size), fused=True)
    found = [Piece(name="average", forward=mean, backward=mean, saved=float(size))] if spec.side else []
    *inner, (width, rows) = spec.layers(c.hidden)
    for number, (k, n) in enumerate(inner, 1):
        inputs, made = at.tokens * k * at.element, float(at.tokens * n * at.element)
        found += linear(at, f"linear {number}", n, k, bias=True, saved=inputs, held=inputs)
        both = Elementwise(num_bytes=3 * made, fused=True)
        found.append(Piece(name=f"linear {number} relu", forward=Elementwise(num_bytes=2 * made), backward=both))
    if spec.loss == SQUARE:
        inputs, made = at.tokens * width * at.element, at.tokens * rows * 4.0
        found += linear(at, "head", rows, width, bias=True, saved=inputs, held=inputs)
        both = Elementwise(num_bytes=2 * made, fused=True)
        return [*found, Piece(name="square", forward=both, backward=both, saved=made)]
    return [*found, *loss(msgspec.structs.replace(at, hidden=width), rows, shared=False)]


def held(spec: ConvolutionPath | ImageStem | ImageClassifier, c: Context) -> Held:
    """Return the parameters, all of which are on every rank and none of which is multiplied below 16 bits."""
    return Held(split=spec.num_params(c.hidden), low=False)


def path_flops(spec: ConvolutionPath, tokens: Tokens) -> Flops:
    """Two for each product of a convolution; norms count none."""
    return _path_flops(spec, isqrt(tokens.items[0][0].new_tokens), tokens.rows)


def _path_flops(spec: ConvolutionPath, side: int, images: int) -> Flops:
    return Flops(weights=2 * sum(one.products(images * made**2) for one, made in spec.sides(side)))


def stem_flops(spec: ImageStem, tokens: Tokens) -> Flops:
    """Return the operations of the path on whole images."""
    return _path_flops(spec.path, isqrt(tokens.batch[0][0].new_tokens), tokens.rows)


def classifier_flops(spec: ImageClassifier, tokens: Tokens) -> Flops:
    """Every image passes the linear layers."""
    return Flops(weights=2 * tokens.rows * sum(k * n for k, n in spec.layers(tokens.hidden)))


def rules(spec: ConvolutionPath | ImageStem | ImageClassifier, plan: Plan, train: Train) -> Iterator[tuple[str, ...]]:
    """Yield what convolutions are not cut by, and what they are not computed in."""
    layout = plan.layout
    if layout.tp > 1:
        yield (
            f"tp={layout.tp}: every rank convolves all channels: tensor parallelism of convolutions is not modelled",
            "say tp1: replicas (dp), sharded state (zero1, fsdp) and pipeline stages (pp) divide the work",
            f"plan.layout.tp = {layout.tp}",
        )
    if layout.cp > 1:
        yield (
            f"cp={layout.cp}: images stay whole, as nothing hands on the rows at the edge of a rank's part while it is "
            "trained",
            "say cp1, and a dp as many times larger",
            f"plan.layout.cp = {layout.cp}",
        )
    dtype = plan.precision.compute or train.dtype
    if DTYPE_BYTES[dtype] < 2:
        own = bool(plan.precision.compute)
        place = f"plan.precision.compute = {dtype}" if own else f"--train dtype={dtype}"
        help = f"say {'' if own else 'dtype='}bf16, fp16 or fp32"
        yield f"{dtype}: convolutions are multiplied in 16 bits or more here", help, place
    if train.lora is not None:
        yield "phase=lora: convolutions have no adapters here", "say phase=pretrain", "--train phase=lora"


KINDS = (
    Kind(name="convolutions", record=ConvolutionPath, pieces=path_pieces, params=held, flops=path_flops, rules=rules),
    Kind(name="image stem", record=ImageStem, pieces=stem_pieces, params=held, flops=stem_flops, rules=rules),
    Kind(
        name="image classifier",
        record=ImageClassifier,
        pieces=classifier_pieces,
        params=held,
        flops=classifier_flops,
        rules=rules,
    ),
)
