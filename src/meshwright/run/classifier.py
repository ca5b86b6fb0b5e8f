"""Modules of classifiers: the stem that reads images, paths of convolutions, linear layers over features, and the head
with its loss.

What flows between them are maps [b, channels, height, width], or vectors [b, width]; :attr:`Pass.tokens` are images or
features, and ``targets`` int64 [b] their classes. Initial values are those of He et al. (2015, 1502.01852) by the
outputs of a convolution, as torchvision and ``transformers`` draw them, and even ones up to the square root of the
inputs of a linear layer, as torch's are.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.run.batch_norm import BatchNorm, counted_before
from meshwright.run.parts import Pass, Shared
from meshwright.run.pieces import Part
from meshwright.spec import image_names
from meshwright.spec.convolution import SQUARE, Convolution2d, ConvolutionPath


class ConvolutionModule(nn.Module):
    """One convolution with the norm behind it, if there is one."""

    def __init__(self, shared: Shared, spec: Convolution2d, names: tuple[str, str], *, normed: bool):
        super().__init__()
        self.spec, (name, norm) = spec, names
        shape = (spec.outputs, spec.inputs // spec.groups, spec.kernel, spec.kernel)
        part = Part(f"{name}.weight", shape, (0, 0, 0, 0), (slice(None),))
        std = (2 / (spec.outputs // spec.groups * spec.taps)) ** 0.5
        self.weight = shared.make(f"{name}.weight", shape, [part], std=std)
        self.bias = None
        if spec.bias:
            part = Part(f"{name}.bias", (spec.outputs,), (0,), (slice(None),))
            self.bias = shared.make(f"{name}.bias", (spec.outputs,), [part], init="zeros")
        self.norm = BatchNorm(shared, norm, spec.outputs) if normed else None

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        spec = self.spec
        x = F.conv2d(x, self.weight, self.bias, spec.stride, spec.kernel // 2, groups=spec.groups)
        return x if self.norm is None else self.norm(x, p)


class PathModule(nn.Module):
    """Convolutions one after the other with ReLU behind each, what came in added before the last, and a pooling."""

    def __init__(self, shared: Shared, spec: ConvolutionPath, names: tuple[tuple[str, str], ...]):
        super().__init__()
        self.spec, normed = spec, bool(spec.norm)
        made = [
            ConvolutionModule(shared, one, name, normed=normed) for one, name in zip(spec.every, names, strict=True)
        ]
        self.convolutions = nn.ModuleList(made[: len(spec.convolutions)])
        self.shortcut = made[-1] if spec.shortcut is not None else None

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        spec, entered = self.spec, x
        for number, one in enumerate(self.convolutions, 1):
            x = one(x, p)
            if number < len(self.convolutions) or not spec.added:
                x = F.relu(x)
        if spec.added:
            x = F.relu(x + (entered if self.shortcut is None else self.shortcut(entered, p)))
        if spec.pooled:
            x = F.max_pool2d(x, spec.window, spec.pooled, (spec.window - 1) // 2)
        return x


def _names(shared: Shared, layer: int) -> tuple[tuple[str, str], ...]:
    named = image_names.residual_names if shared.model.family == "resnet" else image_names.plain_names
    return named(shared.model, layer)


class StemModule(nn.Module):
    """The path on the images themselves."""

    def __init__(self, shared: Shared):
        super().__init__()
        self.path = PathModule(shared, shared.model.embedding.path, _names(shared, -1))

    def forward(self, p: Pass) -> torch.Tensor:
        return self.path(p.tokens, p)


class PathLayer(nn.Module):
    """A path as a layer, done again in the backward where a plan says ``full``."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        self.recompute = recompute
        self.path = PathModule(shared, image_names.path_of(shared.model, layer), _names(shared, layer))

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            twice = partial(lambda module: (nullcontext(), counted_before(module)), self)
            how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": twice}
            return checkpoint(self.path, x, p, **how)
        return self.path(x, p)


class FeatureInput(nn.Module):
    """The features of samples, as they are."""

    def __init__(self, shared: Shared):
        super().__init__()

    def forward(self, p: Pass) -> torch.Tensor:
        return p.tokens


class FeatureLayer(nn.Module):
    """A linear layer and ReLU; of softmax regression nothing."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        self.recompute, self.linear = recompute, None
        for spec in shared.model.block(layer).before:
            self.linear = LinearModule(shared, f"layers.{layer}", spec.inputs, spec.outputs)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.linear is None:
            return x
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class LinearModule(nn.Module):
    """A linear layer with a bias."""

    def __init__(self, shared: Shared, name: str, inputs: int, outputs: int):
        super().__init__()
        made = []
        for suffix, shape in ((".weight", (outputs, inputs)), (".bias", (outputs,))):
            part = Part(name + suffix, shape, (0,) * len(shape), (slice(None),))
            made.append(shared.make(name + suffix, shape, [part], init="uniform", std=inputs**-0.5))
        self.weight, self.bias = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class ClassifierHead(nn.Module):
    """The average of all places, linear layers and the loss, summed over a microbatch's images or vectors."""

    def __init__(self, shared: Shared, tied: nn.Module | None):
        """`tied`: None, as no head of images uses an embedding's table."""
        super().__init__()
        model, self.side, self.loss = shared.model, shared.model.head.side, shared.model.head.loss
        named = zip(image_names.linear_names(model), model.head.layers(model.hidden), strict=True)
        self.layers = nn.ModuleList(LinearModule(shared, name, *sizes) for name, sizes in named)
        #: Held-out images that were classified rightly since somebody set it to 0.
        self.right: torch.Tensor | int = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[b, classes] of maps, or of vectors."""
        x = F.adaptive_avg_pool2d(x, self.side).flatten(1) if self.side else x
        for number, layer in enumerate(self.layers):
            x = layer(F.relu(x) if number else x)
        return x

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss of a microbatch times ``p.scale``, in 32 bits at least."""
        logits = self.logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.loss == SQUARE:
            return (logits - p.targets.to(logits.dtype).view_as(logits)).square().sum() * (p.scale / 2)
        if p.step < 0:
            self.right = self.right + (logits.argmax(1) == p.targets).sum()
        return F.cross_entropy(logits, p.targets, reduction="sum") * p.scale
