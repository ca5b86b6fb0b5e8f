"""Softmax attention of one block on a rank: projections of its heads, rotation, core and output.

Multi-head to multi-query attention (2305.13245), with norms of queries and keys by head or over all heads, and the
rotation, scale and cap that the model's numbers say.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.run.attention import attend, attend_portion
from meshwright.run.collect import copy_to, sum_over
from meshwright.run.lora.adapters import Adapted, adapters_of, products
from meshwright.run.parts import Norm, Pass, RowLinear, Shared
from meshwright.run.pieces import Part
from meshwright.run.rotary import rotate
from meshwright.run.visible import MaskRule
from meshwright.spec.layers import Attention, Block


class HeadsCore(nn.Module):
    """The core of attention: queries, keys and values of this rank's heads, over the whole sequence."""

    #: Set on the layers whose core is recomputed in the backward (selective recomputation).
    drops_core = False

    def __init__(self, shared: Shared, spec: Attention):
        super().__init__()
        self.shared, self.spec, numbers = shared, spec, shared.model.numerics
        self.said = {
            "algorithm": shared.plan.sequence.algorithm,
            "causal": shared.causal,
            "window": spec.window,
            "scale": numbers.scale(spec.head_dim),
            "cap": numbers.score_cap,
        }

    def rotary(self, p: Pass) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The cosines and sines of this layer; None where positions are not rotated."""
        if not self.spec.rotary:
            return None
        return p.local if self.spec.window and p.local is not None else p.rotary

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass) -> torch.Tensor:
        """[b, s, heads, width] in, [b, s, heads, value width] out."""
        if p.core is not None:
            return p.core(self, q, k, v)
        if self.drops_core and torch.is_grad_enabled():
            return checkpoint(self.mixed, q, k, v, p, use_reentrant=False, preserve_rng_state=False)
        return self.mixed(q, k, v, p)

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass) -> torch.Tensor:
        """The same of keys and values of the pass alone."""
        mesh, said = self.shared.mesh, self.said
        if not p.segments:
            outer, inner = mesh["cp_outer"], mesh["cp_inner"]
            return attend(q, k, v, cp=outer, inner=inner, documents=p.documents, **said)
        parts = []
        for start, stop, group, documents in p.segments:
            mine = (x[:, start:stop] for x in (q, k, v))
            parts.append(attend(*mine, cp=group, documents=documents, **said))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def of_portion(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, p: Pass) -> torch.Tensor:
        """Queries from position `start` on, against keys and values up to the last of them."""
        said = {"scale": self.said["scale"], "cap": self.said["cap"], "documents": p.documents}
        return attend_portion(q, k, v, start=start, rule=MaskRule(self.said["causal"], self.said["window"]), **said)


class AttentionModule(nn.Module):
    """Projections, rotation, core and output of one block; this rank's heads."""

    def __init__(self, shared: Shared, prefix: str, spec: Attention, block: Block):
        super().__init__()
        self.shared, self.spec = shared, spec
        tp, size, d = shared.tp, shared.tp.size, spec.head_dim
        self.heads, self.kv_heads = spec.heads // size, max(1, spec.kv_heads // size)
        shares = max(1, size // spec.kv_heads)  # neighbouring ranks that hold the same key-value head
        q, kv = self.heads * d, self.kv_heads * d
        at_q, at_kv = tp.index * q, tp.index // shares * kv
        n, conv, fused = shared.names, shared.names.conv, shared.names.qkv
        names = [f"{prefix}{n.attention}{w}" for w in ((fused,) * 3 if fused else ("q_proj", "k_proj", "v_proj"))]
        wholes = (spec.heads * d, spec.kv_heads * d, spec.kv_heads * d)
        base = (0, wholes[0], wholes[0] + wholes[1]) if fused else (0, 0, 0)
        hidden = shared.model.hidden

        def blocks(which: tuple[int, ...], bias: bool) -> list[Part]:
            out, row = [], 0
            for i in which:
                rows, at = ((q, at_q), (kv, at_kv), (kv, at_kv))[i]
                total = sum(wholes) if fused else wholes[i]
                suffix = ".bias" if bias else ".weight"
                shape, offset = ((total,), (base[i] + at,)) if bias else ((total, hidden), (base[i] + at, 0))
                if conv and not bias:
                    shape, offset = shape[::-1], offset[::-1]
                out.append(Part(names[i] + suffix, shape, offset, (slice(row, row + rows),), conv and not bias))
                row += rows
            return out

        # key-value heads that several ranks share are a parameter of their own: their gradients are summed
        self.split = ((0,), (1, 2)) if shares > 1 else ((0, 1, 2),)
        self.biases, matrices = nn.ParameterList(), []
        for which in self.split:
            rows = sum((q, kv, kv)[i] for i in which)
            alike = shares if 1 in which and shares > 1 else 1
            name = f"{prefix}attention." + "".join("qkv"[i] for i in which)
            extra = {"copies": alike, "sums": alike}
            matrices.append(shared.matrix(f"{name}.weight", (rows, hidden), blocks(which, False), **extra))
            if spec.qkv_bias:
                self.biases.append(shared.make(f"{name}.bias", (rows,), blocks(which, True), init="zeros", **extra))
        self.weights = shared.matrices(matrices)
        places = ((0, 0, 1), (1, 0, shares), (1, kv, shares)) if shares > 1 else ((0, 0), (0, q), (0, q + kv))
        own = zip("qkv", names, wholes, (at_q, at_kv, at_kv), (q, kv, kv), places, strict=True)
        adapted = [
            Adapted(t, name, (n, hidden), (at, 0), (rows, hidden), *place) for t, name, n, at, rows, place in own
        ]
        if fused:  # one matrix has one adapter
            at, rows = tuple(zip(base, (at_q, at_kv, at_kv))), (q, kv, kv)
            blocks_of = tuple((first + mine, count) for (first, mine), count in zip(at, rows))
            adapted = [Adapted("q", names[0], (sum(wholes), hidden), (0, 0), (sum(rows), hidden), blocks=blocks_of)]
        self.adapters = adapters_of(shared, adapted)
        out_name = f"{prefix}{shared.names.attention}{shared.names.out}"
        self.out = RowLinear(shared, out_name, spec.heads * d, hidden, bias=spec.out_bias, target="o")
        self.q_norm = self.k_norm = self.both_norm = None
        if spec.qk_norm and spec.normed_over_all:
            named = f"{prefix}{n.attention}"
            self.both_norm = NormOverHeads(shared, named, spec, (self.heads, self.kv_heads), shares)
        elif spec.qk_norm:
            self.q_norm = Norm(shared, f"{prefix}{n.attention}q_norm", d, block, sums=size)
            self.k_norm = Norm(shared, f"{prefix}{n.attention}k_norm", d, block, sums=size)
        self.core = HeadsCore(shared, spec)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        return self.out(self.core(*self.projected(x, p), p).transpose(0, 1).flatten(-2), p)

    def of_portion(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, p: Pass) -> torch.Tensor:
        """The output [s, b, hidden] of queries from position `start` on, keys and values up to the last of them."""
        return self.out(self.core.of_portion(q, k, v, start, p).transpose(0, 1).flatten(-2), p)

    def projected(self, x: torch.Tensor, p: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [b, s, heads, d] of hidden states [s, b, hidden], turned by their positions."""
        shared, d = self.shared, self.spec.head_dim
        made = products(shared, x, list(self.weights), self.adapters, p, "qkv")
        if self.biases:
            made = [y + b for y, b in zip(made, self.biases)]
        qkv = made[0] if len(made) == 1 else torch.cat(made, dim=-1)
        limit = shared.model.numerics.clip_qkv
        if limit and self.both_norm is None:
            qkv = qkv.clamp(-limit, limit)
        # [s, b, heads * d] -> [b, s, heads, d]; queries and keys are turned as one
        both, v = qkv.unflatten(-1, (-1, d)).transpose(0, 1).split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.both_norm is not None:
            both = self.both_norm(both)
            both, v = (both.clamp(-limit, limit), v.clamp(-limit, limit)) if limit else (both, v)
        elif self.q_norm is not None:
            q, k = both.split([self.heads, self.kv_heads], dim=2)
            both = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        if (rotary := self.core.rotary(p)) is not None:
            both = rotate(both, *rotary, shared.plan.kernels.compile)
        q, k = both.split([self.heads, self.kv_heads], dim=2)
        return q, k, v.contiguous()  # rows far apart, as they lie beside the keys, share places in a cache


class NormOverHeads(nn.Module):
    """RMSNorms of queries and of keys, each over all its heads together (OLMo 2, OLMoE): the squares of heads on other
    tensor-parallel ranks are added in one message. ``shares`` neighbouring ranks hold the same key-value heads."""

    def __init__(self, shared: Shared, prefix: str, spec: Attention, held: tuple[int, int], shares: int):
        super().__init__()
        self.tp, self.eps, self.held, d = shared.tp, shared.model.numerics.norm_eps, held, spec.head_dim
        self.widths, self.shares = (spec.heads * d, spec.kv_heads * d), (1, shares)
        at = (shared.tp.index, shared.tp.index // shares)
        made = []
        for word, heads, whole, index, alike in zip(("q_norm", "k_norm"), held, self.widths, at, self.shares):
            name, size = f"{prefix}{word}.weight", heads * d
            part = Part(name, (whole,), (index * size,), (slice(None),))
            made.append(shared.make(name, (size,), [part], init="ones", copies=alike, sums=alike))
        self.q, self.k = made

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        """Queries and keys [b, s, heads + kv_heads, d] in and out."""
        made = both.split(list(self.held), dim=2)
        if self.tp.alone:
            pairs = zip(made, self.widths, (self.q, self.k))
            normed = [F.rms_norm(x.flatten(-2), (width,), w, self.eps).view_as(x) for x, width, w in pairs]
            return torch.cat(normed, dim=2)
        kind = torch.promote_types(both.dtype, torch.float32)
        wide = [x.to(kind) for x in made]
        squares = torch.stack([x.square().sum((-2, -1)) / n for x, n in zip(wide, self.shares)], dim=-1)
        squares = copy_to(sum_over(squares, self.tp), self.tp)
        out = []
        for i, (x, width, weight) in enumerate(zip(wide, self.widths, (self.q, self.k))):
            scale = torch.rsqrt(squares[..., i] / width + self.eps)[..., None, None]
            out.append((x * scale).to(both.dtype) * weight.view(x.shape[-2:]))
        return torch.cat(out, dim=2)
