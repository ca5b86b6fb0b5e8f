"""T5: an encoder reads a text of which some tokens are hidden, a decoder that sees all of it writes the text.

Raffel et al. (2019, 1910.10683); the aim is the denoising of BART (Lewis et al. 2019, section 2.2), with hidden tokens
as long as what they hide. What flows through the layers is both stacks' hidden states and both learned biases of their
scores, which every layer of a stack adds.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.run.activation import ACTIVATIONS
from meshwright.run.encoder import hidden_tokens
from meshwright.run.linear import matmul
from meshwright.run.loss import cross_entropy
from meshwright.run.parts import dropped
from meshwright.run.plain import Linear, PlainNorm, matrix

#: Distance in tokens from which all are one bucket (Raffel et al. 2019, section 2.1).
FARTHEST = 128

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states of the encoder and of the decoder [s, b, h], learned biases of both stacks' scores [heads, s, s]."""


def buckets(length: int, count: int, *, both_ways: bool, device: torch.device) -> torch.Tensor:
    """Number of the bucket of every (query, key), int64 [s, s]: near distances one by one, far ones by their logarithm,
    half of the buckets for keys that come later where these are seen."""
    at = torch.arange(length, device=device)
    apart = at.unsqueeze(0) - at.unsqueeze(1)
    first = torch.zeros_like(apart)
    if both_ways:
        count //= 2
        first, apart = (apart > 0) * count, apart.abs()
    else:
        apart = (-apart).clamp_min(0)
    near = count // 2
    far = torch.log(apart.clamp_min(1).float() / near) / math.log(FARTHEST / near) * (count - near)
    return first + torch.where(apart < near, apart, (near + far.long()).clamp_max(count - 1))


class PairEmbedding(nn.Module):
    """One table for the tokens of both stacks, and the biases that their distances add to scores."""

    def __init__(self, shared):
        super().__init__()
        model = shared.model
        self.shared = shared
        self.weight = matrix(shared, "shared.weight", model.vocab, model.hidden, 1.0)
        heads = model.blocks[0].attention.heads
        self.count = model.blocks[0].attention.position_params // heads
        name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        self.encoder, self.decoder = (
            matrix(shared, name.format(stack), self.count, heads) for stack in ("encoder", "decoder")
        )

    def forward(self, p) -> State:
        shared, length = self.shared, p.tokens.shape[1]
        hidden = hidden_tokens(p.rows, shared.seed, p.step)
        read = torch.where(hidden, shared.model.vocab - 1, p.tokens)
        read, written = F.embedding(read.T, self.weight), F.embedding(p.tokens.T, self.weight)
        biases = []
        for table, both_ways in ((self.encoder, True), (self.decoder, False)):
            where = buckets(length, self.count, both_ways=both_ways, device=table.device)
            biases.append(F.embedding(where, table).permute(2, 0, 1).contiguous())
        return dropped(shared, read, p, 0), dropped(shared, written, p, 1), biases[0], biases[1]


class PairAttention(nn.Module):
    """Attention whose scores are not scaled and get a learned bias."""

    def __init__(self, shared, name: str, spec):
        super().__init__()
        self.spec, hidden, width = spec, shared.model.hidden, spec.heads * spec.head_dim
        self.q, self.k, self.v = (Linear(shared, f"{name}.{word}", width, hidden) for word in "qkv")
        self.out = Linear(shared, f"{name}.o", hidden, width, deep=True)

    def forward(self, x: torch.Tensor, source: torch.Tensor, bias: torch.Tensor | None, p, *, causal: bool):
        q = self.q(x).transpose(0, 1).unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)
        k, v = (
            f(source).transpose(0, 1).unflatten(-1, (self.spec.heads, -1)).transpose(1, 2) for f in (self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        if p.documents is not None:
            apart = p.documents.unsqueeze(-1) != p.documents.unsqueeze(-2)
            scores = scores.masked_fill(apart.unsqueeze(1), float("-inf"))
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(-2).transpose(0, 1))


class PairMlp(nn.Module):
    """Two matrices, or three with a gate, without biases."""

    def __init__(self, shared, name: str, spec):
        super().__init__()
        hidden = shared.model.hidden
        words = ("wi_0", "wi_1") if spec.gated else ("wi",)
        self.into = nn.ModuleList(Linear(shared, f"{name}.{word}", spec.ffn, hidden) for word in words)
        self.down = Linear(shared, f"{name}.wo", hidden, spec.ffn, deep=True)
        self.act = ACTIVATIONS["gelu_new" if spec.gated and spec.activation == "gelu" else spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.act(self.into[0](x))
        return self.down(up if len(self.into) == 1 else up * self.into[1](x))


class PairLayer(nn.Module):
    """A layer of the encoder or of the decoder, which changes its own stack's hidden states."""

    def __init__(self, shared, layer: int, recompute: str):
        super().__init__()
        model, block = shared.model, shared.model.block(layer)
        self.shared, self.layer, self.recompute = shared, layer, recompute
        self.decodes = block.stream == 1
        first = sum(model.block(i).stream == 0 for i in range(model.num_layers))
        self.ends = layer == first - 1
        at = f"{'decoder' if self.decodes else 'encoder'}.block.{layer - first if self.decodes else layer}.layer."
        self.attention = PairAttention(shared, f"{at}0.SelfAttention", block.attention)
        self.cross = PairAttention(shared, f"{at}1.EncDecAttention", block.cross) if block.cross is not None else None
        last = 1 if self.cross is None else 2
        self.mlp = PairMlp(shared, f"{at}{last}.DenseReluDense", block.mlp)
        self.norms = nn.ModuleList(PlainNorm(shared, f"{at}{i}.layer_norm", model.hidden) for i in range(last + 1))
        self.final = PlainNorm(shared, "encoder.final_layer_norm", model.hidden) if self.ends else None

    def merge(self, state: State, changed: torch.Tensor) -> State:
        """The state behind this layer, which changed its stack's hidden states."""
        read, written, *biases = state
        return (read, changed, *biases) if self.decodes else (changed, written, *biases)

    def forward(self, state: State, p) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, *state, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(*state, p)

    def _forward(self, read, written, encoder_bias, decoder_bias, p) -> torch.Tensor:
        x, bias = (written, decoder_bias) if self.decodes else (read, encoder_bias)
        site = 3 * self.layer + 2
        y = self.norms[0](x)
        x = x + dropped(self.shared, self.attention(y, y, bias, p, causal=self.decodes), p, site)
        if self.cross is not None:
            x = x + dropped(self.shared, self.cross(self.norms[1](x), read, None, p, causal=False), p, site + 1)
        x = x + dropped(self.shared, self.mlp(self.norms[-1](x)), p, site + 2)
        return x if self.final is None else self.final(x)


class PairHead(nn.Module):
    """Final norm and the loss of the next token, by the shared table or one of its own."""

    def __init__(self, shared, tied: PairEmbedding | None):
        super().__init__()
        model = shared.model
        self.shared, self._tied = shared, (tied,) if tied is not None else ()
        self.norm = PlainNorm(shared, "decoder.final_layer_norm", model.hidden)
        if tied is None:
            self.weight = matrix(shared, "lm_head.weight", model.vocab, model.hidden)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if not self._tied:
            return matmul(x, self.weight)
        return matmul(x * self.shared.model.hidden**-0.5, self._tied[0].weight)

    def forward(self, state: State, p) -> torch.Tensor:
        return cross_entropy(self.logits(state[1]), p.targets.T, 0, self.shared.tp) * p.scale
