"""Modules of image classifiers: the stem that reads images, paths of convolutions, and the head with its loss.

What flows between them are maps [b, channels, height, width]; :attr:`Pass.tokens` are images, and ``targets`` int64 [b]
their classes. Initial values are those of He et al. (2015, 1502.01852) by the outputs of a convolution, as torchvision
and ``transformers`` draw them, and even ones up to the square root of the inputs of a linear layer, as torch's are.
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
from meshwright.spec.convolution import Convolution2d, ConvolutionPath


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


class ClassifierHead(nn.Module):
    """The average of all places, linear layers and the cross-entropy, summed over a microbatch's images."""

    def __init__(self, shared: Shared, tied: nn.Module | None):
        """`tied`: None, as no head of images uses an embedding's table."""
        super().__init__()
        model, self.side = shared.model, shared.model.head.side
        sizes = model.head.layers(model.hidden)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for name, (inputs, outputs) in zip(image_names.linear_names(model), sizes, strict=True):
            for suffix, shape, into in (
                (".weight", (outputs, inputs), self.weights),
                (".bias", (outputs,), self.biases),
            ):
                part = Part(name + suffix, shape, (0,) * len(shape), (slice(None),))
                into.append(shared.make(name + suffix, shape, [part], init="uniform", std=inputs**-0.5))
        #: Held-out images that were classified rightly since somebody set it to 0.
        self.right: torch.Tensor | int = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[b, classes] of maps."""
        x = F.adaptive_avg_pool2d(x, self.side).flatten(1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = F.linear(F.relu(x) if number else x, weight, bias)
        return x

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss of a microbatch times ``p.scale``, in 32 bits at least."""
        logits = self.logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if p.step < 0:
            self.right = self.right + (logits.argmax(1) == p.targets).sum()
        return F.cross_entropy(logits, p.targets, reduction="sum") * p.scale
