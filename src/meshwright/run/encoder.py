"""BERT: every token sees every other, norms stand behind attention and MLP, hidden tokens are to be found.

Devlin et al. (2018, 1810.04805). A share of the tokens is hidden behind the last row of the vocabulary, the same ones
on whatever ranks, and the loss is that of finding them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.run.activation import ACTIVATIONS
from meshwright.run.attention import attend
from meshwright.run.linear import matmul
from meshwright.run.loss import cross_entropy
from meshwright.run.parts import dropped
from meshwright.run.plain import Linear, PlainNorm, matrix, vector

#: Share of a sequence's tokens that are hidden (Devlin et al. 2018, section 3.1).
HIDDEN = 0.15


def hidden_tokens(rows: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Which tokens are hidden, bool [b, s], of the numbers [s, b] that tokens have in the global batch: the share with
    the smallest hashes in each sequence, so that every sequence hides as many."""
    mixed = (rows.T + (seed * 1_000_003 + step) % 2**31 * 2**31) * 6_364_136_223_846_793_005
    mixed = (mixed ^ (mixed >> 29)) * 3_202_034_522_624_059_733
    order = (mixed ^ (mixed >> 32)).argsort(1).argsort(1)
    return order < max(1, round(HIDDEN * rows.shape[0]))


class EncoderEmbedding(nn.Module):
    """Tokens, some of them hidden, positions and the first token type, and a norm behind their sum."""

    def __init__(self, shared):
        super().__init__()
        model, at = shared.model, "bert.embeddings."
        self.shared = shared
        self.weight = matrix(shared, f"{at}word_embeddings.weight", model.vocab, model.hidden)
        self.positions = matrix(shared, f"{at}position_embeddings.weight", model.embedding.positions, model.hidden)
        self.types = matrix(shared, f"{at}token_type_embeddings.weight", model.embedding.types, model.hidden)
        self.norm = PlainNorm(shared, f"{at}LayerNorm", model.hidden, bias=True)

    def forward(self, p) -> torch.Tensor:
        hidden = hidden_tokens(p.rows, self.shared.seed, p.step)
        tokens = torch.where(hidden, self.shared.model.vocab - 1, p.tokens).T
        places = p.positions.T if p.positions.dim() == 2 else p.positions.unsqueeze(1)
        x = F.embedding(tokens, self.weight) + F.embedding(places, self.positions) + self.types[0]
        return dropped(self.shared, self.norm(x), p, 0)


class EncoderAttention(nn.Module):
    """Attention of all tokens to all others, with biases."""

    def __init__(self, shared, name: str, spec):
        super().__init__()
        self.shared, self.spec, hidden = shared, spec, shared.model.hidden
        width = spec.heads * spec.head_dim
        self.q, self.k, self.v = (
            Linear(shared, f"{name}self.{word}", width, hidden, bias=True) for word in ("query", "key", "value")
        )
        self.out = Linear(shared, f"{name}output.dense", hidden, width, bias=True, deep=True)

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        q, k, v = (f(x).transpose(0, 1).unflatten(-1, (self.spec.heads, -1)) for f in (self.q, self.k, self.v))
        alone = self.shared.mesh["cp_outer"]
        out = attend(q, k, v, cp=alone, algorithm="ring", causal=False, documents=p.documents)
        return self.out(out.flatten(-2).transpose(0, 1))


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, shared, layer: int, recompute: str):
        super().__init__()
        block, at = shared.model.block(layer), f"bert.encoder.layer.{layer}."
        hidden, ffn = shared.model.hidden, block.mlp.ffn
        self.shared, self.layer, self.recompute = shared, layer, recompute
        self.attention = EncoderAttention(shared, f"{at}attention.", block.attention)
        self.attention_norm = PlainNorm(shared, f"{at}attention.output.LayerNorm", hidden, bias=True)
        self.up = Linear(shared, f"{at}intermediate.dense", ffn, hidden, bias=True)
        self.down = Linear(shared, f"{at}output.dense", hidden, ffn, bias=True, deep=True)
        self.mlp_norm = PlainNorm(shared, f"{at}output.LayerNorm", hidden, bias=True)
        self.act = ACTIVATIONS[block.mlp.activation]

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p) -> torch.Tensor:
        x = self.attention_norm(x + dropped(self.shared, self.attention(x, p), p, 2 * self.layer + 1))
        return self.mlp_norm(x + dropped(self.shared, self.down(self.act(self.up(x))), p, 2 * self.layer + 2))


class EncoderHead(nn.Module):
    """A dense layer, GELU, a norm, the embedding's table and a bias: the loss of finding what was hidden."""

    def __init__(self, shared, tied: EncoderEmbedding):
        super().__init__()
        hidden, at = shared.model.hidden, "cls.predictions."
        self.shared, self._tied = shared, (tied,)
        self.transform = Linear(shared, f"{at}transform.dense", hidden, hidden, bias=True)
        self.norm = PlainNorm(shared, f"{at}transform.LayerNorm", hidden, bias=True)
        self.bias = vector(shared, f"{at}bias", shared.model.vocab, "zeros")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(self.norm(F.gelu(self.transform(x))), self._tied[0].weight) + self.bias

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        """The mean loss of hidden tokens, times the share of the step's tokens that this microbatch is."""
        hidden = hidden_tokens(p.rows, self.shared.seed, p.step)
        targets = torch.where(hidden, p.tokens, -1).T
        scale = p.scale * hidden.shape[1] / max(1, round(HIDDEN * hidden.shape[1]))
        return cross_entropy(self.logits(x), targets, 0, self.shared.tp) * scale
