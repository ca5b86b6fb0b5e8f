"""The encoder of an image autoencoder, forward alone: images to latents, layer by layer (Rombach et al., 2112.10752).

Its modules and the names of their weights are those of diffusers' ``AutoencoderKL``. Weights are frozen and whole on
every rank. A layer takes what the layer before it made of some images, [rows, channels, height, width], and images do
not meet: any number of rows may pass together.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.run import noise
from meshwright.run.parameters import Maker, initialise
from meshwright.run.pieces import Part
from meshwright.spec.architecture import Model
from meshwright.spec.convolution import Convolution2d
from meshwright.spec.layers import Block
from meshwright.spec.unet import MapConvolution, Resampling, TimedResidual

#: Added to a norm's variance (diffusers, Encoder).
EPS = 1e-6
#: What latents are multiplied by, so that their variance is about one (Rombach et al., section 4.3.2; diffusers'
#: scaling_factor of this autoencoder).
SCALE = 0.18215
#: Bounds of the logarithm of a latent's variance (diffusers, DiagonalGaussianDistribution).
LEAST, MOST = -30.0, 20.0


class _Whole(nn.Module):
    """A product or a convolution that every rank has whole, of this published weight."""

    def __init__(self, make: Maker, name: str, shape: tuple[int, ...]):
        super().__init__()
        std = float(torch.tensor(shape[1:]).prod()) ** -0.5
        for word, sizes in (("weight", shape), ("bias", shape[:1])):
            part = Part(f"{name}.{word}", sizes, (0,) * len(sizes), (slice(None),))
            init = {"std": std} if word == "weight" else {"init": "zeros"}
            setattr(self, word, make(f"{name}.{word}", sizes, [part], **init))


class _Convolution(_Whole):
    def __init__(self, make: Maker, name: str, spec: Convolution2d):
        super().__init__(make, name, (spec.outputs, spec.inputs, spec.kernel, spec.kernel))
        self.stride, self.padding = spec.stride, spec.kernel // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class _Linear(_Whole):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _Norm(nn.Module):
    def __init__(self, make: Maker, name: str, channels: int, groups: int):
        super().__init__()
        self.groups = groups
        for word, init in (("weight", "ones"), ("bias", "zeros")):
            part = Part(f"{name}.{word}", (channels,), (0,), (slice(None),))
            setattr(self, word, make(f"{name}.{word}", (channels,), [part], init=init))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias, EPS)


class _Residual(nn.Module):
    def __init__(self, make: Maker, name: str, spec: TimedResidual):
        super().__init__()
        first, second = spec.convolutions
        self.norms = nn.ModuleList(
            _Norm(make, f"{name}.norm{i}", one.inputs, spec.groups) for i, one in ((1, first), (2, second))
        )
        self.convolutions = nn.ModuleList(
            _Convolution(make, f"{name}.conv{i}", one) for i, one in ((1, first), (2, second))
        )
        self.shortcut = None
        if spec.shortcut is not None:
            self.shortcut = _Convolution(make, f"{name}.conv_shortcut", spec.shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x
        for norm, convolution in zip(self.norms, self.convolutions):
            found = convolution(F.silu(norm(found)))
        return found + (x if self.shortcut is None else self.shortcut(x))


class _Halving(_Convolution):
    """A 3x3 convolution at every second place, of maps with a row and a column of zeros behind them alone."""

    def __init__(self, make: Maker, name: str, spec: Resampling):
        super().__init__(make, name, spec.convolution)
        self.padding = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class _Attention(nn.Module):
    """One head over all places."""

    def __init__(self, make: Maker, name: str, width: int, groups: int):
        super().__init__()
        self.norm = _Norm(make, f"{name}.group_norm", width, groups)
        words = ("to_q", "to_k", "to_v", "to_out.0")
        self.products = nn.ModuleList(_Linear(make, f"{name}.{word}", (width, width)) for word in words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (product(places) for product in self.products[:3])
        mixed = self.products[3](F.scaled_dot_product_attention(q, k, v))
        return x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])


class _Ends(nn.Sequential):
    """The first convolution, or the last ones behind a norm."""

    def __init__(self, make: Maker, names: list[str], parts: list[MapConvolution], norm: str):
        made: list[nn.Module] = []
        for name, part in zip(names, parts):
            if part.groups:
                made += [_Norm(make, norm, part.inputs, part.groups), nn.SiLU()]
            made.append(_Convolution(make, name, part.convolution))
        super().__init__(*made)


class ImageEncoder(nn.Module):
    """The frozen layers of a model on one rank, as modules in their order, with their first values."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype, seed: int):
        super().__init__()
        make = Maker(device, dtype, frozen=dtype)
        blocks = [model.block(layer) for layer in range(model.frozen)]
        groups = next(part.groups for block in blocks for part in block.before if isinstance(part, TimedResidual))
        self.layers = nn.ModuleList(
            _module(make, name, block, groups) for name, block in zip(_names(blocks), blocks, strict=True)
        )
        initialise(self.parameters(), seed)

    def __len__(self) -> int:
        return len(self.layers)

    @torch.no_grad()
    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The maps that one layer makes of some rows."""
        return self.layers[layer](x)


def latents(moments: torch.Tensor, rows: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """The latents that are drawn of the encoder's ``moments`` [rows, 2 * channels, height, width]: which, depends on
    the seed, the step of the run and the image's place in the global batch."""
    mean, spread = moments.chunk(2, 1)
    drawn = noise.latent_noise(tuple(mean.shape), rows, seed, step).to(moments.dtype)
    return SCALE * (mean + torch.exp(0.5 * spread.clamp(LEAST, MOST)) * drawn)


def _module(make: Maker, name: str, block: Block, groups: int) -> nn.Module:
    if block.attention is not None:
        return _Attention(make, name, block.attention.head_dim, groups)
    part = block.before[0]
    if isinstance(part, TimedResidual):
        return _Residual(make, name, part)
    if isinstance(part, Resampling):
        return _Halving(make, name, part)
    parts = [one for one in block.before if isinstance(one, MapConvolution)]
    return _Ends(make, name.split(), parts, "vae.encoder.conv_norm_out")


def _names(blocks: list[Block]) -> list[str]:
    """The published name of each layer; of the last, of both its convolutions."""
    out, level, resnet = ["vae.encoder.conv_in"], 0, 0
    middle = next(i for i, block in enumerate(blocks) if block.attention is not None)
    for block in blocks[1 : middle - 1]:
        if isinstance(block.before[0], Resampling):
            out.append(f"vae.encoder.down_blocks.{level}.downsamplers.0.conv")
            level, resnet = level + 1, 0
        else:
            out.append(f"vae.encoder.down_blocks.{level}.resnets.{resnet}")
            resnet += 1
    inside = "vae.encoder.mid_block"
    return [
        *out,
        f"{inside}.resnets.0",
        f"{inside}.attentions.0",
        f"{inside}.resnets.1",
        "vae.encoder.conv_out vae.quant_conv",
    ]
