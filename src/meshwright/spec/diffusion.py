"""Parts of diffusion transformers: patches of noisy latents, norms that a step and a class decide, and the noise found.

DiT (Peebles and Xie, 2212.09748) and its form for videos, Latte (Ma et al. 2401.03048), whose blocks attend over the
places of a frame and over frames in turn; with adaptive norms that begin at zero: from the embedding of a step and a
class a product makes the scales, shifts and gates of a block, one vector for each sequence and not for each token.
"""

from __future__ import annotations

import msgspec

#: Pixels along a side of one latent: the autoencoder of latent diffusion (Rombach et al., 2112.10752), as DiT uses it.
LATENT_PIXELS = 8
#: Steps of the noise that such a model learns to find (Ho et al. 2020, 2006.11239, section 4).
NOISE_STEPS = 1000


class Latents(msgspec.Struct, frozen=True, kw_only=True):
    """Patches of noisy latents become hidden states; the step and the class become one vector of a sequence.

    Attributes:
        channels: of a latent.
        patch: side of a patch, in latents.
        positions: rows of a fixed table of positions, which the checkpoint holds.
        classes: rows of the table of classes, that of no class included; 0 = none.
        frequencies: numbers that a step is written in before its two products.
        frames: of a video, for each of which a fixed table has a row; 0 = images alone.
        stream: which tokens.
        source: the stream of latents, where layers of the same model make them; -1 = they are what comes in.
    """

    channels: int
    patch: int
    positions: int
    classes: int
    frequencies: int = 256
    frames: int = 0
    stream: int = 0
    source: int = -1

    @property
    def reads(self) -> tuple[int, ...]:
        """Streams that it needs."""
        return (self.stream,) if self.source < 0 else (self.stream, self.source)

    @property
    def inner(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch**2

    def step_params(self, hidden: int) -> int:
        """Parameters of the two products that a step passes."""
        return (self.frequencies + 1) * hidden + (hidden + 1) * hidden

    def looked_up(self, hidden: int) -> int:
        """Parameters that are added and multiply nothing: positions, of frames too, and a class's row."""
        return (self.positions + self.frames + self.classes) * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters of the patches' product, the step's and the tables."""
        return (self.inner + 1) * hidden + self.step_params(hidden) + self.looked_up(hidden)


class Modulation(msgspec.Struct, frozen=True, kw_only=True):
    """The product by which a step and a class scale, shift and gate a block's paths: ``vectors`` of the hidden width
    for each sequence (adaLN-Zero: a shift, a scale and a gate for attention and for the MLP)."""

    vectors: int = 6

    def num_params(self, hidden: int) -> int:
        """Parameters of the product and its bias."""
        return (hidden + 1) * self.vectors * hidden


class DimSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """The place between a block and one before it that attends over another dim of a video: ``over`` is the one to
    come. Nothing is computed; where that dim is the one that ranks share, they share the other from here (``dsp``)."""

    over: str

    def num_params(self, hidden: int) -> int:
        """Parameters: none."""
        return 0


class Denoised(msgspec.Struct, frozen=True, kw_only=True):
    """The last layer: a norm that is scaled and shifted, and a product from hidden states to patches of ``channels``
    (the noise and, where that is learned, its variance), whose squared error is the loss."""

    channels: int
    patch: int
    stream: int = 0

    @property
    def inner(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch**2

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm, which has none of its own."""
        return 0

    def num_params(self, hidden: int) -> int:
        """Parameters of the modulation and of the product."""
        return Modulation(vectors=2).num_params(hidden) + (hidden + 1) * self.inner


class NoisyClasses(msgspec.Struct, frozen=True, kw_only=True):
    """The last layer of a classifier of noisy samples: the norm of :class:`Denoised`, the mean over a sample's tokens
    and a product to ``rows`` classes, whose cross-entropy is the loss: that by which samples are guided to a class
    (Dhariwal and Nichol, 2105.05233, section 4), or a router of experts, whose classes are clusters (2501.05450)."""

    rows: int
    stream: int = 0

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm, which has none of its own."""
        return 0

    def num_params(self, hidden: int) -> int:
        """Parameters of the modulation and of the product."""
        return Modulation(vectors=2).num_params(hidden) + (hidden + 1) * self.rows
