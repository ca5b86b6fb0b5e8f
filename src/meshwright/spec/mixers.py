"""Layers that mix tokens in place of softmax attention: state-space layers and the gated delta rule.

Mamba (Gu and Dao 2023, 2312.00752), Mamba-2 (Dao and Gu 2024, 2405.21060), Gated DeltaNet (Yang et al. 2024,
2412.06464). Each record counts its parameters exactly as the published checkpoint stores them.
"""

from __future__ import annotations

import msgspec

from meshwright.spec.layers import Attention


class Mamba(msgspec.Struct, frozen=True, kw_only=True):
    """A selective state-space layer: every channel of ``inner`` keeps ``state`` numbers, and a step size of rank
    ``dt_rank`` says how fast they change.

    Attributes:
        kernel: taps of the causal convolution before the scan.
        bias: biases on the projections in and out.
        conv_bias: a bias on the convolution.
        normed: step size and both input maps are normalised (Jamba).
    """

    inner: int
    state: int
    dt_rank: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    normed: bool = False

    def num_params(self, hidden: int) -> int:
        """Parameters in a model of width `hidden`."""
        into = (hidden + int(self.bias)) * 2 * self.inner
        conv = self.inner * (self.kernel + int(self.conv_bias))
        selected = self.inner * (self.dt_rank + 2 * self.state) + (self.dt_rank + 1) * self.inner
        norms = self.dt_rank + 2 * self.state if self.normed else 0
        out = self.inner * hidden + (hidden if self.bias else 0)
        return into + conv + selected + norms + self.inner * (self.state + 1) + out


class Mamba2(msgspec.Struct, frozen=True, kw_only=True):
    """A state-space layer with one decay per head: ``heads`` heads of ``head_dim`` channels, each a matrix of
    ``head_dim`` x ``state``, whose input and output maps ``groups`` of heads share.

    Attributes:
        kernel: taps of the causal convolution before the scan.
        chunk: tokens that the scan multiplies at once.
        bias: biases on the projections in and out.
        conv_bias: a bias on the convolution.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    chunk: int = 256
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: those of the scan, and both maps of every group."""
        return self.inner + 2 * self.groups * self.state

    def num_params(self, hidden: int) -> int:
        """Parameters in a model of width `hidden`: decay, step size and skip of each head, and the gated norm too."""
        into = (hidden + int(self.bias)) * (self.inner + self.conv_width + self.heads)
        conv = self.conv_width * (self.kernel + int(self.conv_bias))
        out = self.inner * hidden + (hidden if self.bias else 0)
        return into + conv + 3 * self.heads + self.inner + out


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Linear attention by the gated delta rule: each of ``heads`` value heads keeps a matrix of ``k_head_dim`` x
    ``v_head_dim``, decays it and writes into it what its key does not yet recall; ``k_heads`` key heads are shared.

    Attributes:
        kernel: taps of the causal convolution of queries, keys and values.
        chunk: tokens that the scan multiplies at once.
    """

    heads: int
    k_heads: int
    k_head_dim: int
    v_head_dim: int
    kernel: int
    chunk: int = 64

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.k_heads * self.k_head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.heads * self.v_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def num_params(self, hidden: int) -> int:
        """Parameters in a model of width `hidden`: decay and step of each head, and the gated norm too."""
        into = hidden * (self.conv_width + self.value_width + 2 * self.heads)
        return into + self.conv_width * self.kernel + 2 * self.heads + self.v_head_dim + self.value_width * hidden


class SharedTransformer(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer block whose weights several layers of a model share (Zamba2, 2411.15242): attention over hidden
    states beside the embedding of the same tokens, a gated MLP, adapters of the place and a projection of its own.

    Attributes:
        heads, kv_heads, head_dim: of the attention, which reads twice the model's width.
        ffn: inner width of the MLP.
        rank: of the place's own adapters of the MLP, and of the attention when `adapts_attention`.
        borrows: an earlier place of the model holds the shared weights.
        number: which of the model's shared blocks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rank: int
    adapts_attention: bool = False
    activation: str = "gelu"
    rotary: bool = False
    bias: bool = False
    borrows: bool = False
    number: int = 0

    @property
    def attention(self) -> Attention:
        """The attention inside it."""
        width = self.head_dim
        return Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=width, v_head_dim=width, rotary=self.rotary)

    def shared_params(self, hidden: int) -> int:
        """Parameters that the places share: four projections, the MLP and both norms."""
        attention = 2 * hidden * (self.heads + 2 * self.kv_heads) * self.head_dim + self.heads * self.head_dim * hidden
        biases = 2 * self.ffn + hidden if self.bias else 0
        return attention + 3 * hidden * self.ffn + biases + 3 * hidden

    def own_params(self, hidden: int) -> int:
        """Parameters of one place: the adapters and the projection back into the residual stream."""
        mlp = self.rank * (hidden + 2 * self.ffn)
        attention = 3 * self.rank * 4 * hidden if self.adapts_attention else 0
        return mlp + attention + hidden * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters that this place adds to the model."""
        return self.own_params(hidden) + (0 if self.borrows else self.shared_params(hidden))
