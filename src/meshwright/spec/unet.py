"""Parts of the U-Nets of latent diffusion (Rombach et al., 2021, arXiv 2112.10752), as diffusers lays them out.

A path goes down through maps half as large each time and up again, where each residual block reads beside what comes
from below what the path down left at that height (Ronneberger et al., 2015, arXiv 1505.04597). Residual blocks are told
the step: a product of its embedding is added to every place. Between them transformers attend over the places of a map
and over the words of a text.
"""

from __future__ import annotations

import msgspec

from meshwright.spec.convolution import Convolution2d

#: Learned vectors of a group norm.
_VECTORS = 2


class TimedResidual(msgspec.Struct, frozen=True, kw_only=True):
    """Two 3x3 convolutions from ``inputs`` channels to ``outputs``, each behind a group norm and SiLU, the step's
    embedding of ``step`` numbers added between them; and what came in, through a 1x1 convolution where widths differ.

    Attributes:
        step: width of the step's embedding, 0 = it is not told the step (an autoencoder's).
        groups: of the norms.
        stream: whose maps come in.
        skip: the stream of the path down whose maps are put beside them, -1 = none.
    """

    inputs: int
    outputs: int
    step: int
    groups: int
    stream: int
    skip: int = -1

    @property
    def reads(self) -> tuple[int, ...]:
        """Streams whose maps it needs."""
        return (self.stream,) if self.skip < 0 else (self.stream, self.skip)

    @property
    def convolutions(self) -> tuple[Convolution2d, Convolution2d]:
        """The two 3x3 convolutions."""
        first = Convolution2d(inputs=self.inputs, outputs=self.outputs, kernel=3, bias=True)
        return first, msgspec.structs.replace(first, inputs=self.outputs)

    @property
    def shortcut(self) -> Convolution2d | None:
        """The convolution of what came in, None where it has the right width."""
        if self.inputs == self.outputs:
            return None
        return Convolution2d(inputs=self.inputs, outputs=self.outputs, kernel=1, bias=True)

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 2 + bool(self.step) + (self.shortcut is not None)

    def num_params(self, hidden: int) -> int:
        """Parameters of convolutions, norms and the step's product."""
        found = sum(one.num_params for one in self.convolutions)
        found += (self.step + 1) * self.outputs if self.step else 0
        found += _VECTORS * (self.inputs + self.outputs)
        return found + (self.shortcut.num_params if self.shortcut is not None else 0)


class MapProjection(msgspec.Struct, frozen=True, kw_only=True):
    """The linear layer of every place into a map's transformers, behind a group norm (``enters``), or out of them,
    added to what went in."""

    channels: int
    groups: int
    enters: bool
    stream: int

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 1

    def num_params(self, hidden: int) -> int:
        """Parameters of the product, its bias and the norm."""
        return (self.channels + 1) * self.channels + (_VECTORS * self.channels if self.enters else 0)


class Resampling(msgspec.Struct, frozen=True, kw_only=True):
    """A 3x3 convolution at every second place, which halves a map's sides; or, ``up``, of maps whose every place is
    repeated twice along both sides."""

    channels: int
    stream: int
    up: bool = False

    @property
    def convolution(self) -> Convolution2d:
        """The convolution."""
        return Convolution2d(
            inputs=self.channels, outputs=self.channels, kernel=3, stride=1 if self.up else 2, bias=True
        )

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 1

    def num_params(self, hidden: int) -> int:
        """Parameters of the convolution."""
        return self.convolution.num_params


class MapConvolution(msgspec.Struct, frozen=True, kw_only=True):
    """One convolution between maps: the first and the last of an autoencoder's encoder, those that read a picture of
    what an image shall look like, and those that add what they find to another network's maps (ControlNet, Zhang et
    al., 2023, arXiv 2302.05543, whose weights begin at zero).

    Attributes:
        groups: of the group norm, with SiLU, before it; 0 = there is none.
        silu: SiLU behind it.
        reads_data: what comes in has no gradient.
        stream: whose maps come in.
    """

    inputs: int
    outputs: int
    stream: int
    kernel: int = 3
    stride: int = 1
    groups: int = 0
    silu: bool = False
    reads_data: bool = False

    @property
    def convolution(self) -> Convolution2d:
        """The convolution."""
        return Convolution2d(
            inputs=self.inputs, outputs=self.outputs, kernel=self.kernel, stride=self.stride, bias=True
        )

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 1

    def num_params(self, hidden: int) -> int:
        """Parameters of the convolution and the norm."""
        return self.convolution.num_params + (_VECTORS * self.inputs if self.groups else 0)


class LatentStem(msgspec.Struct, frozen=True, kw_only=True):
    """The first layer of a U-Net: a 3x3 convolution of the latents, and the two products of the step's embedding; of
    conditions beside the text (sizes and crops, and a pooled text: SDXL, 2307.01952) as many.

    Attributes:
        inner: channels of a latent.
        outputs: of the convolution.
        step: width of the embedding.
        conditions: numbers that further conditions are written in, 0 = none.
        frames: of a video: none.
    """

    inner: int
    outputs: int
    step: int
    conditions: int = 0
    stream: int = 0
    frames: int = 0

    @property
    def convolution(self) -> Convolution2d:
        """The convolution of the latents."""
        return Convolution2d(inputs=self.inner, outputs=self.outputs, kernel=3, bias=True)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the products of each image's vectors."""
        found = ((self.outputs, self.step), (self.step, self.step))
        return (*found, (self.conditions, self.step), (self.step, self.step)) if self.conditions else found

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 1 + len(self.products)

    def num_params(self, hidden: int) -> int:
        """Parameters of the convolution and the products."""
        return self.convolution.num_params + sum((k + 1) * n for k, n in self.products)


class LatentNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The last layer of a U-Net: a group norm, SiLU, a 3x3 convolution to the channels of the noise, and the squared
    error of it. ``locked``: it is not trained, and gradients pass it (:class:`~meshwright.spec.layers.Block`)."""

    channels: int
    outputs: int
    groups: int
    stream: int
    locked: bool = False

    @property
    def convolution(self) -> Convolution2d:
        """The convolution to the noise."""
        return Convolution2d(inputs=self.channels, outputs=self.outputs, kernel=3, bias=True)

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm."""
        return _VECTORS * self.channels

    def num_params(self, hidden: int) -> int:
        """Parameters of norm and convolution."""
        return self.norm_params(hidden) + self.convolution.num_params
