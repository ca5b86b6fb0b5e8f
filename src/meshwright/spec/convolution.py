"""Convolutions over images: their records, and the paths, stems and classifiers that networks of them are made of.

ResNet (He et al., 2015, arXiv 1512.03385) adds what a path of convolutions found to what came in; VGG (Simonyan and
Zisserman, 2014, arXiv 1409.1556) is paths alone, and pooling between some. Batch norm: Ioffe and Szegedy, 2015, arXiv
1502.03167. What flows are feature maps: a stream (:class:`~meshwright.spec.ends.Stream`) whose ``scale`` says how many
times smaller than the image their sides are, and whose tokens are their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

#: Norms of feature maps: over the images of a microbatch on one rank, or over groups of the channels of each image.
BATCH, GROUP = "batch", "group"
#: Learned vectors of such a norm: a scale and a shift.
NORM_VECTORS = 2
#: Losses of a classifier: of classes, or half the squared distance from values.
CROSS_ENTROPY, SQUARE = "cross_entropy", "square"


class Convolution2d(msgspec.Struct, frozen=True, kw_only=True):
    """A convolution with a square ``kernel`` from ``inputs`` channels to ``outputs``, in ``groups`` of channels that do
    not meet, at every ``stride``-th place; padded so that maps shrink by the stride alone."""

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    groups: int = 1
    bias: bool = False

    @property
    def depthwise(self) -> bool:
        """Whether every channel is convolved by itself."""
        return self.groups == self.inputs == self.outputs > 1

    @property
    def taps(self) -> int:
        """Places of the input that a place of the output reads."""
        return self.kernel**2

    @property
    def num_params(self) -> int:
        """Weights, and a bias for each output."""
        return self.outputs * (self.inputs // self.groups * self.taps + int(self.bias))

    def products(self, places: int) -> int:
        """Return the multiplications that so many places of the output take, padding as if it were image."""
        return places * self.outputs * self.inputs // self.groups * self.taps


class ConvolutionPath(msgspec.Struct, frozen=True, kw_only=True):
    """Convolutions one after the other, each followed by its norm and ReLU, over the maps of a stream.

    Attributes:
        convolutions: in order.
        norm: the norm behind each (``batch``), "" = none.
        added: what came in is added to what the path found, before the last ReLU.
        shortcut: the convolution (with a norm) through which what came in passes first, None = none.
        pooled: stride of the max pooling behind it all, 0 = none, with ``window`` places a side.
        stream: whose maps come in.
    """

    convolutions: tuple[Convolution2d, ...]
    norm: str = BATCH
    added: bool = False
    shortcut: Convolution2d | None = None
    pooled: int = 0
    window: int = 0
    stream: int = 0

    @property
    def every(self) -> tuple[Convolution2d, ...]:
        """All convolutions, the shortcut's last."""
        return self.convolutions if self.shortcut is None else (*self.convolutions, self.shortcut)

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return len(self.every)

    def num_params(self, hidden: int) -> int:
        """Parameters of convolutions and norms."""
        vectors = NORM_VECTORS if self.norm else 0
        return sum(one.num_params + vectors * one.outputs for one in self.every)

    def sides(self, side: int) -> Iterator[tuple[Convolution2d, int]]:
        """Yield every convolution with the side of the maps that it makes of maps of a `side`."""
        entered = side
        for one in self.convolutions:
            side = -(-side // one.stride)
            yield one, side
        if self.shortcut is not None:
            yield self.shortcut, -(-entered // self.shortcut.stride)


class ImageStem(msgspec.Struct, frozen=True, kw_only=True):
    """The first layer of a network of convolutions: a path that reads the image itself."""

    path: ConvolutionPath
    stream: int = 0

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.path.convolutions[0].inputs

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return self.path.num_matrices

    def num_params(self, hidden: int) -> int:
        """Parameters of the path."""
        return self.path.num_params(hidden)


class ImageClassifier(msgspec.Struct, frozen=True, kw_only=True):
    """The last layer of an image classifier: maps are averaged to ``side`` places a side, and what is left of each
    image passes linear layers (``widths``, with ReLU behind each), the last to ``rows`` classes and cross-entropy, or
    to as many values and their ``square``. ``side`` 0: no maps but vectors come in."""

    rows: int
    side: int = 1
    widths: tuple[int, ...] = ()
    stream: int = 0
    loss: str = CROSS_ENTROPY

    def layers(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the linear layers behind maps of so many channels."""
        sizes = (hidden * max(1, self.side) ** 2, *self.widths, self.rows)
        return tuple(pairwise(sizes))

    def norm_params(self, hidden: int) -> int:
        """Parameters of a norm before it: none."""
        return 0

    def num_params(self, hidden: int) -> int:
        """Parameters of the linear layers and their biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in self.layers(hidden))
