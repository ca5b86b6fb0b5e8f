"""Networks of convolutions that classify images: ResNet (1512.03385) as ``transformers`` says it, and VGG (1409.1556).

A ResNet's stages have maps half as large and channels twice as many as those before. Strides are in the 3x3 convolution
of a bottleneck unless ``downsample_in_bottleneck`` puts them in the first one, as the paper has it and torchvision does
not. Small images (CIFAR) take a stem of 3x3 without a stride or a pooling: ``stem_kernel``, ``stem_stride`` and
``stem_pooling``, for which ``transformers`` has no keys. Nor has it VGG: ``features`` is torchvision's list, with "M"
for a pooling.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from meshwright.spec.architecture import Model
from meshwright.spec.convolution import BATCH, Convolution2d, ConvolutionPath, ImageClassifier, ImageStem
from meshwright.spec.ends import Stream
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import MAX_LAYERS, ConfigReader
from meshwright.spec.layers import Block

#: Kinds of blocks of a ResNet, and how many times narrower the middle of a bottleneck is.
BASIC, BOTTLENECK = "basic", "bottleneck"
NARROWER = 4
#: The pooling of a list of features, its stride and its window.
POOLING, HALVED = "M", 2
#: Most stages of a network, each of which halves its maps.
MAX_STAGES = 16
#: The sides of a ResNet's first convolution and of the window of its pooling.
STEM_KERNEL, STEM_WINDOW = 7, 3


def maps(scale: int, channels: int, *, padded: bool = True) -> Stream:
    """The stream of feature maps of an image: none of their places is later than another."""
    return Stream(name=f"maps of 1/{scale}", hidden=channels, scale=scale, causal=False, padded=padded)


def resnet(r: ConfigReader) -> Model:
    """ResNet: a stem, stages of basic or bottleneck blocks, an average over all places and one linear layer."""
    first = r.int("embedding_size", default=64)
    widths = r.ints("hidden_sizes", low=1) or [256, 512, 1024, 2048]
    depths = r.ints("depths", length=len(widths), low=1) or [3, 4, 6, 3]
    kind = r.text("layer_type", default=BOTTLENECK)
    if kind not in (BASIC, BOTTLENECK):
        r.fault("M002", f"layer_type is neither {BASIC} nor {BOTTLENECK}", "layer_type", f"say {BOTTLENECK}")
    if kind == BOTTLENECK and any(width % NARROWER for width in widths):
        r.fault("M003", f"{NARROWER} does not divide every width of hidden_sizes", "hidden_sizes", "as 256, 512")
    if sum(depths) > MAX_LAYERS or len(widths) > MAX_STAGES:
        r.fault("M002", f"more than {MAX_LAYERS} blocks or {MAX_STAGES} stages", "depths", "as [3, 4, 6, 3]")
    _relu(r)
    r.raise_faults()
    early, in_first = (r.flag(f"downsample_in_{key}", default=False) for key in ("bottleneck", "first_stage"))
    r.ignore("out_features", "out_indices", "stage_names")
    halved, pooled = r.int("stem_stride", default=2, high=MAX_STAGES), r.flag("stem_pooling", default=True)
    kernel, inputs = r.int("stem_kernel", default=STEM_KERNEL), r.int("num_channels", default=3)
    stem = Convolution2d(inputs=inputs, outputs=first, kernel=kernel, stride=halved)
    scale, channels = halved * (HALVED if pooled else 1), first
    streams, blocks = [maps(scale, first)], []
    for stage, (width, depth) in enumerate(zip(widths, depths)):
        stride = 2 if stage or in_first else 1
        scale *= stride
        streams.append(maps(scale, width))
        for number in range(depth):
            each = stride if number == 0 else 1
            path = _path(kind, channels, width, each, early=early, stream=len(streams) - 1 - (number == 0))
            blocks.append(Block(before=(path,), norms=0, stream=len(streams) - 1))
            channels = width
    shrunk = {"pooled": HALVED, "window": STEM_WINDOW} if pooled else {}
    return model(
        r,
        blocks,
        embedding=ImageStem(path=ConvolutionPath(convolutions=(stem,), **shrunk)),
        head=ImageClassifier(rows=_classes(r), stream=len(streams) - 1),
        hidden=channels,
        max_seq_len=0,
        streams=tuple(streams),
    )


def _path(kind: str, inputs: int, width: int, stride: int, *, early: bool, stream: int) -> ConvolutionPath:
    """The path of a block from `inputs` channels to `width`, with the shortcut that it needs."""
    if kind == BASIC:
        found = [
            Convolution2d(inputs=inputs, outputs=width, kernel=3, stride=stride),
            Convolution2d(inputs=width, outputs=width, kernel=3),
        ]
    else:
        narrow, strides = width // NARROWER, (stride, 1) if early else (1, stride)
        found = [
            Convolution2d(inputs=inputs, outputs=narrow, kernel=1, stride=strides[0]),
            Convolution2d(inputs=narrow, outputs=narrow, kernel=3, stride=strides[1]),
            Convolution2d(inputs=narrow, outputs=width, kernel=1),
        ]
    other = inputs != width or stride > 1
    shortcut = Convolution2d(inputs=inputs, outputs=width, kernel=1, stride=stride) if other else None
    return ConvolutionPath(convolutions=tuple(found), added=True, shortcut=shortcut, stream=stream)


def vgg(r: ConfigReader) -> Model:
    """VGG: 3x3 convolutions with biases and poolings, an average to 7 x 7 places, and linear layers."""
    said = r.config.get("features")
    r.ignore("features")
    if not _features(said):
        r.fault("M002", f"features is a list of widths and {POOLING!r}, a width first", "features", '[64, "M", 128]')
    elif said.count(POOLING) > MAX_STAGES:
        r.fault("M002", f"more than {MAX_STAGES} poolings", "features", '[64, "M", 128]')
    r.raise_faults()
    norm = BATCH if r.flag("batch_norm", default=False) else ""
    inputs, scale, streams, paths = r.int("num_channels", default=3), 1, [], []
    for place, width in enumerate(said):
        if width == POOLING:
            continue
        halved = HALVED if place + 1 < len(said) and said[place + 1] == POOLING else 0
        scale *= halved or 1
        one = Convolution2d(inputs=inputs, outputs=width, kernel=3, bias=True)
        stream = max(0, len(streams) - 1)
        if not streams or halved or streams[-1].hidden != width:
            streams.append(maps(scale, width, padded=False))
        path = ConvolutionPath(convolutions=(one,), norm=norm, pooled=halved, window=halved, stream=stream)
        paths.append((path, len(streams) - 1))
        inputs = width
    (first, _), *others = paths
    hidden_layers = tuple(r.ints("classifier_widths", low=1) or [4096, 4096])
    head = ImageClassifier(
        rows=_classes(r), side=r.int("pooled_side", default=7), widths=hidden_layers, stream=len(streams) - 1
    )
    return model(
        r,
        [Block(before=(path,), norms=0, stream=stream) for path, stream in others],
        embedding=ImageStem(path=first),
        head=head,
        hidden=inputs,
        max_seq_len=0,
        streams=tuple(streams),
    )


def _features(said: Any) -> bool:
    """Whether a list of features begins with a width, and has two of them and no pooling behind another."""
    if not isinstance(said, list) or not 3 <= len(said) <= MAX_LAYERS or said[0] == POOLING:
        return False
    widths = [one for one in said if one != POOLING]
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in widths)
    twice = any(one == other == POOLING for one, other in pairwise(said))
    return whole and len(widths) > 1 and not twice


def _relu(r: ConfigReader) -> None:
    if r.text("hidden_act", default="relu") != "relu":
        r.fault("M005", "hidden_act is not modelled", "hidden_act", "modelled: relu")


def _classes(r: ConfigReader) -> int:
    labels = r.config.get("id2label")
    named = len(labels) if isinstance(labels, dict) and labels else 1000
    return r.int("num_labels", "num_classes", default=named)
