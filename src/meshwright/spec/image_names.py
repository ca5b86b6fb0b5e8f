"""Names of the tensors of image classifiers: ResNet's as ``transformers`` has them (ResNetForImageClassification), and
VGG's as torchvision does."""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.convolution import ConvolutionPath

#: Modules of torchvision's classifier of a VGG for each of its linear layers: the layer, a ReLU and a dropout.
CLASSIFIER_STEP = 3


def path_of(model: Model, layer: int) -> ConvolutionPath:
    """Return the path of convolutions that a block is, or the embedding (layer -1)."""
    if layer < 0:
        return model.embedding.path
    (path,) = model.block(layer).before
    return path


def residual_names(model: Model, layer: int) -> tuple[tuple[str, str], ...]:
    """Return the names of a residual network's convolutions and of their norms, the shortcut's last, of a block or
    of the embedding (layer -1)."""
    if layer < 0:
        stems = ["resnet.embedder.embedder."]
    else:
        stage = model.block(layer).stream - 1
        place = sum(1 for one in range(layer) if model.block(one).stream - 1 == stage)
        prefix, path = f"resnet.encoder.stages.{stage}.layers.{place}.", path_of(model, layer)
        stems = [f"{prefix}layer.{number}." for number in range(len(path.convolutions))]
        stems += [f"{prefix}shortcut."] if path.shortcut is not None else []
    return tuple((f"{stem}convolution", f"{stem}normalization") for stem in stems)


def plain_names(model: Model, layer: int) -> tuple[tuple[str, str], ...]:
    """Return the names of the convolution and of its norm of one layer of a VGG (the first is -1)."""
    at = sum(_modules(path_of(model, one)) for one in range(-1, layer))
    return ((f"features.{at}", f"features.{at + 1}"),)


def _modules(path: ConvolutionPath) -> int:
    """Modules that a path is in torchvision's list: convolution, norm, ReLU and pooling."""
    return 2 + bool(path.norm) + bool(path.pooled)


def linear_names(model: Model) -> tuple[str, ...]:
    """Return the names of the linear layers of a classifier, in order."""
    count = len(model.head.widths) + 1
    if model.family == "resnet":
        return ("classifier.1",)
    if not model.head.side:  # of features, whose layers between are numbered too
        return ("classifier",)
    return tuple(f"classifier.{CLASSIFIER_STEP * number}" for number in range(count))
