"""Multi-head latent attention of one block on a rank (DeepSeek-V2, 2405.04434, section 2.1).

Keys and values of all heads are made of one latent per token, queries of one more or of the token itself, and one
rotated key is shared by all heads. The latents are computed on every tensor-parallel rank, which then makes its own
heads of them; the exchanges between ranks are those of any attention, one into the block and one out of it.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.run.linear import matmul
from meshwright.run.lora.adapters import Adapted, AdaptedProducts, adapters_of, products
from meshwright.run.parts import Norm, Pass, RowLinear, Shared
from meshwright.run.pieces import Part
from meshwright.run.rotary import pairs_apart, rotate
from meshwright.run.self_attention import HeadsCore
from meshwright.spec.layers import Attention, Block

#: Added to the variance in the norms of latents, whatever the model's own norms have (DeepSeek-V2's published code).
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Projections down to the latents and up to this rank's heads, rotation, core and output."""

    def __init__(self, shared: Shared, prefix: str, spec: Attention, block: Block):
        super().__init__()
        self.shared, self.spec = shared, spec
        self.heads, at = spec.heads // shared.tp.size, f"{prefix}{shared.names.attention}"
        self.plain = spec.head_dim - spec.rope_head_dim
        hidden, kv_width = shared.model.hidden, spec.kv_lora_rank + spec.rope_head_dim
        names = [(f"{at}q_a_proj", spec.q_lora_rank)] if spec.q_lora_rank else []
        names.append((f"{at}kv_a_proj_with_mqa", kv_width))
        self.down = self._whole(f"{prefix}attention.down.weight", names, ".weight", hidden)
        self.down_bias = None
        if spec.qkv_bias:
            self.down_bias = self._whole(f"{prefix}attention.down.bias", names, ".bias")
        self.widths = [rows for _, rows in names]
        per_rank = {"sums": shared.tp.size, "eps": LATENT_EPS}
        self.q_norm = None
        if spec.q_lora_rank:
            self.q_norm = Norm(shared, f"{at}q_a_layernorm", spec.q_lora_rank, block, **per_rank)
        self.kv_norm = Norm(shared, f"{at}kv_a_layernorm", spec.kv_lora_rank, block, **per_rank)
        word = "q_b_proj" if spec.q_lora_rank else "q_proj"
        self.q = self._heads(f"{at}{word}.weight", spec.head_dim, spec.q_lora_rank or hidden)
        self.up = self._heads(f"{at}kv_b_proj.weight", self.plain + spec.v_head_dim, spec.kv_lora_rank)
        # of what every rank holds whole each has a part of the gradient, in adapters as in the matrices
        tp, rows = shared.tp, self.heads * spec.head_dim
        adapted = [
            Adapted(t, said, (n, hidden), (0, 0), (n, hidden), 0, sum(self.widths[:i]), tp.size)
            for i, (t, (said, n)) in enumerate(zip("qk" if spec.q_lora_rank else "k", names, strict=True))
        ]
        if not spec.q_lora_rank:
            whole = (spec.heads * spec.head_dim, hidden)
            adapted.append(Adapted("q", f"{at}q_proj", whole, (tp.index * rows, 0), (rows, hidden), 1))
        self.adapters = adapters_of(shared, adapted)
        self.q_adapters, self.up_adapters = (
            self._of_heads(target, f"{at}{word}", width, inner) if inner else None
            for target, word, width, inner in (
                ("q_up", "q_b_proj", spec.head_dim, spec.q_lora_rank),
                ("kv_up", "kv_b_proj", self.plain + spec.v_head_dim, spec.kv_lora_rank),
            )
        )
        inner = spec.heads * spec.v_head_dim
        self.out = RowLinear(shared, f"{at}{shared.names.out}", inner, hidden, bias=spec.out_bias, target="o")
        self.core = HeadsCore(shared, spec)

    def _whole(self, name: str, names: list[tuple[str, int]], suffix: str, *inner: int) -> nn.Parameter:
        """Tensors below each other that every rank holds, of whose gradient each has the part of its own heads."""
        parts, row, beside = [], 0, (0,) * len(inner)
        for said, rows in names:
            parts.append(Part(f"{said}{suffix}", (rows, *inner), (0, *beside), (slice(row, row + rows),)))
            row += rows
        init, alike = "normal" if inner else "zeros", self.shared.tp.size
        return self.shared.make(name, (row, *inner), parts, init=init, copies=alike, sums=alike)

    def _heads(self, name: str, width: int, inner: int) -> nn.Parameter:
        """The rows of this rank's heads."""
        shape, rows = (self.spec.heads * width, inner), self.heads * width
        part = Part(name, shape, (self.shared.tp.index * rows, 0), (slice(None),))
        return self.shared.make(name, (rows, inner), [part])

    def _of_heads(self, target: str, name: str, width: int, inner: int) -> AdaptedProducts | None:
        """The adapter of a projection from a latent to this rank's heads."""
        shape, rows = (self.spec.heads * width, inner), self.heads * width
        return adapters_of(self.shared, [Adapted(target, name, shape, (self.shared.tp.index * rows, 0), (rows, inner))])

    def _from_latent(
        self, latent: torch.Tensor, weight: torch.Tensor, adapters: AdaptedProducts | None, p: Pass
    ) -> torch.Tensor:
        made = matmul(latent, weight, self.shared.low)
        return made if adapters is None else adapters.add([made], latent, p)[0]

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        shared, spec = self.shared, self.spec
        into = [self.down] if self.q_norm is not None else [self.down, self.q]
        down, *queries = products(shared, x, into, self.adapters, p)
        down = down if self.down_bias is None else down + self.down_bias
        *latent, kv = down.split(self.widths, -1)
        q = self._from_latent(self.q_norm(latent[0]), self.q, self.q_adapters, p) if latent else queries[0]
        latent, key = kv.split([spec.kv_lora_rank, spec.rope_head_dim], -1)
        made = self._from_latent(self.kv_norm(latent), self.up, self.up_adapters, p)
        # [s, b, heads * width] -> [b, s, heads, width]
        q, made = (y.unflatten(-1, (self.heads, -1)).transpose(0, 1) for y in (q, made))
        q, turned = q.split([self.plain, spec.rope_head_dim], -1)
        k, v = made.split([self.plain, spec.v_head_dim], -1)
        turned = torch.cat((turned, key.transpose(0, 1).unsqueeze(2)), 2)
        if shared.model.numerics.rope_interleaved:
            turned = pairs_apart(turned)
        turned, key = rotate(turned, *self.core.rotary(p), shared.plan.kernels.compile).split([self.heads, 1], 2)
        q, k = torch.cat((q, turned), -1), torch.cat((k, key.expand(-1, -1, self.heads, -1)), -1)
        out = self.core(q, k, v.contiguous(), p)
        return self.out(out.transpose(0, 1).flatten(-2), p)
