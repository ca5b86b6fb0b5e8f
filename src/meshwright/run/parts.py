"""The parts of a decoder transformer, built from the :class:`~meshwright.spec.model.Model` that ``predict`` reads, for
one rank of a plan: grouped-query attention, rotary or learned positions, RMSNorm or LayerNorm, gated or plain MLPs,
mixtures of experts.

Inside, hidden states are [tokens of the sequence on this rank, batch, hidden]: first the context-parallel part of the
sequence, then, under sequence parallelism and outside tensor-parallel regions, a shard of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.plan import Plan
from meshwright.run.activation import activate
from meshwright.run.attention import attend
from meshwright.run.collect import copy_to, gather_dim, scatter_dim, sum_over
from meshwright.run.dropout import dropout
from meshwright.run.linear import column_parallel, matmul, row_parallel
from meshwright.run.loss import cross_entropy
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.parameters import INIT_STD, Maker
from meshwright.run.pieces import Part
from meshwright.run.rotary import rotate
from meshwright.spec import naming
from meshwright.spec.layers import Attention as AttentionSpec
from meshwright.spec.layers import Block, Dense
from meshwright.spec.model import Model
from meshwright.spec.routing import Routing
from meshwright.spec.workload import Train


class Segment(NamedTuple):
    """Tokens [start, stop) of a rank's row, which the ranks of ``group`` share, and ``documents`` int32 [1, S] of all
    tokens that they share."""

    start: int
    stop: int
    group: AxisGroup
    documents: torch.Tensor


class Pass(NamedTuple):
    """The arguments of one microbatch's pass, the same for every layer of a rank.

    ``tokens``, ``targets`` int64 [b, s] on this context-parallel rank (a target of -1 is none), ``positions`` int64 [s]
    in the sequence, or [b, s] in the documents of each, ``documents`` int32 [b, S] of the whole sequences or None,
    ``rotary`` the cosines and sines [s, 1, width] or [b, s, 1, width], ``rows`` int64 [s, b] numbers of the tokens in
    the global batch, ``scale`` what the summed loss is multiplied by. ``segments`` are parts of the one row that
    different groups of ranks share; () where all of it is shared alike.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    rows: torch.Tensor
    scale: float
    step: int = 0
    segments: tuple[Segment, ...] = ()


class Shared(NamedTuple):
    """The arguments with which all modules of a rank are built. ``apart``: sums over tensor-parallel ranks are made by
    who runs the modules (:mod:`meshwright.run.overlapped`), which take and give this rank's part. ``node_ranks`` are
    the devices of a node that the plan is for, 0 where all are on one."""

    model: Model
    plan: Plan
    mesh: ProcessMesh
    make: Maker
    names: naming.Names
    dropout: float
    seed: int
    causal: bool
    apart: bool = False
    train: Train | None = None
    node_ranks: int = 0

    @property
    def tiles(self) -> bool:
        """Whether products go in the steps of a ring with the gathers and sums next to them."""
        return self.sp and self.plan.overlap.tp and not self.plan.overlap.how

    @property
    def routing(self) -> Routing | None:
        """How tokens are said to be routed."""
        return None if self.train is None else self.train.routing

    @property
    def tp(self):
        return self.mesh["tp"]

    @property
    def sp(self) -> bool:
        """Whether hidden states between tensor-parallel regions are shards of the sequence."""
        return self.plan.layout.sp and not self.tp.alone

    def conv(self, name: str, channels: int, taps: int) -> nn.Parameter:
        """The taps of a convolution of every channel by itself, [channels, 1, taps]."""
        shape = (channels, 1, taps)
        return self.make(name, shape, [Part(name, shape, (0, 0, 0), (slice(None),))], std=taps**-0.5)

    @property
    def shard_sums(self) -> int:
        """Tensor-parallel ranks that each have a part of a replicated parameter's gradient."""
        return self.tp.size if self.sp else 1

    def my_shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of something whole along dim 0, under sequence parallelism."""
        if not self.sp:
            return x
        length = x.shape[0] // self.tp.size
        return x[self.tp.index * length : (self.tp.index + 1) * length]

    def enter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A product of hidden states into a tensor-parallel region."""
        if self.apart:
            return matmul(x, weight)
        keep = self.plan.memory.gathered == "kept"
        return column_parallel(x, weight, self.tp, sequence=self.sp, keep=keep, tiles=self.tiles)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial results out of a tensor-parallel region."""
        return scatter_dim(x, self.tp, 0) if self.sp else sum_over(x, self.tp)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension."""

    def __init__(self, shared: Shared, name: str, width: int, block: Block, *, sums: int):
        super().__init__()
        self.width, self.eps, self.rms = width, shared.model.numerics.norm_eps, block.norm == "rmsnorm"
        copies = shared.tp.size

        def vector(suffix: str, init: str) -> nn.Parameter:
            part = Part(name + suffix, (width,), (0,), (slice(None),))
            return shared.make(name + suffix, (width,), [part], init=init, copies=copies, sums=sums)

        self.weight = vector(".weight", "ones") if block.norm_vectors else None
        self.bias = vector(".bias", "zeros") if block.norm_vectors > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class AttentionModule(nn.Module):
    """Projections, rotation, core and output of one block; this rank's heads."""

    def __init__(self, shared: Shared, prefix: str, spec: AttentionSpec, block: Block):
        super().__init__()
        self.shared, self.spec = shared, spec
        tp, size, d = shared.tp, shared.tp.size, spec.head_dim
        self.heads, self.kv_heads = spec.heads // size, max(1, spec.kv_heads // size)
        shares = max(1, size // spec.kv_heads)  # neighbouring ranks that hold the same key-value head
        q, kv = self.heads * d, self.kv_heads * d
        at_q, at_kv = tp.index * q, tp.index // shares * kv
        n, conv = shared.names, shared.names.conv
        names = [f"{prefix}{n.attention}{w}" for w in (("c_attn",) * 3 if conv else ("q_proj", "k_proj", "v_proj"))]
        wholes = (spec.heads * d, spec.kv_heads * d, spec.kv_heads * d)
        base = (0, wholes[0], wholes[0] + wholes[1]) if conv else (0, 0, 0)
        hidden = shared.model.hidden

        def blocks(which: tuple[int, ...], bias: bool) -> list[Part]:
            out, row = [], 0
            for i in which:
                rows, at = ((q, at_q), (kv, at_kv), (kv, at_kv))[i]
                total = sum(wholes) if conv else wholes[i]
                suffix = ".bias" if bias else ".weight"
                shape, offset = ((total,), (base[i] + at,)) if bias else ((total, hidden), (base[i] + at, 0))
                if conv and not bias:
                    shape, offset = shape[::-1], offset[::-1]
                out.append(Part(names[i] + suffix, shape, offset, (slice(row, row + rows),), conv and not bias))
                row += rows
            return out

        # key-value heads that several ranks share are a parameter of their own: their gradients are summed
        self.split = ((0,), (1, 2)) if shares > 1 else ((0, 1, 2),)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for which in self.split:
            rows = sum((q, kv, kv)[i] for i in which)
            alike = shares if 1 in which and shares > 1 else 1
            name = f"{prefix}attention." + "".join("qkv"[i] for i in which)
            extra = {"copies": alike, "sums": alike}
            self.weights.append(shared.make(f"{name}.weight", (rows, hidden), blocks(which, False), **extra))
            if spec.qkv_bias:
                self.biases.append(shared.make(f"{name}.bias", (rows,), blocks(which, True), init="zeros", **extra))
        out_name = f"{prefix}{n.attention}{n.out}"
        self.out = RowLinear(shared, out_name, spec.heads * d, hidden, bias=spec.out_bias)
        per_head = {"sums": size}
        self.q_norm = Norm(shared, f"{prefix}{n.attention}q_norm", d, block, **per_head) if spec.qk_norm else None
        self.k_norm = Norm(shared, f"{prefix}{n.attention}k_norm", d, block, **per_head) if spec.qk_norm else None

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        shared, d = self.shared, self.spec.head_dim
        made = [shared.enter(x, w) for w in self.weights]
        if self.biases:
            made = [y + b for y, b in zip(made, self.biases)]
        qkv = made[0] if len(made) == 1 else torch.cat(made, dim=-1)
        # [s, b, heads * d] -> [b, s, heads, d]; queries and keys are turned as one
        both, v = qkv.unflatten(-1, (-1, d)).transpose(0, 1).split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None:
            q, k = both.split([self.heads, self.kv_heads], dim=2)
            both = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        if p.rotary is not None and self.spec.rotary:
            both = rotate(both, *p.rotary)
        q, k = both.split([self.heads, self.kv_heads], dim=2)
        v = v.contiguous()  # rows far apart, as they lie beside the keys, share places in a cache
        out = self._core(q, k, v, p)
        return self.out(out.transpose(0, 1).flatten(-2))

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass) -> torch.Tensor:
        shared = self.shared

        said = {
            "algorithm": shared.plan.sequence.algorithm,
            "causal": shared.causal,
            "window": self.spec.window,
            "scale": self.spec.head_dim**-0.5,
        }

        def core(q, k, v):
            if not p.segments:
                outer, inner = shared.mesh["cp_outer"], shared.mesh["cp_inner"]
                return attend(q, k, v, cp=outer, inner=inner, documents=p.documents, **said)
            parts = []
            for start, stop, group, documents in p.segments:
                mine = (x[:, start:stop] for x in (q, k, v))
                parts.append(attend(*mine, cp=group, documents=documents, **said))
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

        if self.drops_core and torch.is_grad_enabled():
            return checkpoint(core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        return core(q, k, v)

    #: Set on the layers whose core is recomputed in the backward (selective recomputation).
    drops_core = False


class RowLinear(nn.Module):
    """A projection out of a tensor-parallel region: this rank's columns, results summed, bias once."""

    def __init__(self, shared: Shared, name: str, inner: int, outer: int, *, bias: bool):
        super().__init__()
        self.shared = shared
        width = inner // shared.tp.size
        std = INIT_STD / (2 * shared.model.num_layers) ** 0.5
        shape, offset, conv = (outer, inner), (0, shared.tp.index * width), shared.names.conv
        if conv:
            shape, offset = shape[::-1], offset[::-1]
        part = Part(f"{name}.weight", shape, offset, (slice(None),), conv)
        self.weight = shared.make(f"{name}.weight", (outer, width), [part], std=std)
        self.bias = None
        if bias:
            part = Part(f"{name}.bias", (outer,), (0,), (slice(None),))
            self.bias = shared.make(
                f"{name}.bias", (outer,), [part], init="zeros", copies=shared.tp.size, sums=shared.shard_sums
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shared.apart:
            return matmul(x, self.weight)
        if self.shared.tiles:
            return self.landed(row_parallel(x, self.weight, self.shared.tp))
        return self.landed(self.shared.leave(matmul(x, self.weight)))

    def landed(self, out: torch.Tensor) -> torch.Tensor:
        """The summed results with the bias."""
        return out if self.bias is None else out + self.bias


class Mlp(nn.Module):
    """Up (and gate), activation, down."""

    def __init__(self, shared: Shared, prefix: str, spec: Dense):
        super().__init__()
        self.shared, self.spec = shared, spec
        n, hidden, tp = shared.names, shared.model.hidden, shared.tp
        width = spec.ffn // tp.size
        words = (n.gate, n.up) if spec.gated else (n.up,)

        def parts(suffix: str) -> list[Part]:
            out = []
            for i, word in enumerate(words):
                shape, offset = ((spec.ffn, hidden), (tp.index * width, 0))
                if suffix == ".bias":
                    shape, offset = shape[:1], offset[:1]
                elif n.conv:
                    shape, offset = shape[::-1], offset[::-1]
                turned = n.conv and suffix == ".weight"
                rows = (slice(i * width, (i + 1) * width),)
                out.append(Part(f"{prefix}{n.mlp}{word}{suffix}", shape, offset, rows, turned))
            return out

        rows = width * len(words)
        self.weight = shared.make(f"{prefix}{n.mlp}up.weight", (rows, hidden), parts(".weight"))
        self.bias = None
        if spec.bias:
            self.bias = shared.make(f"{prefix}{n.mlp}up.bias", (rows,), parts(".bias"), init="zeros")
        self.down = RowLinear(shared, f"{prefix}{n.mlp}{n.down}", spec.ffn, hidden, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.shared.enter(x, self.weight)
        if self.bias is not None:
            up = up + self.bias
        return self.down(activate(up, self.spec))


def dropped(shared: Shared, x: torch.Tensor, p: Pass, site: int) -> torch.Tensor:
    if not shared.dropout or p.step < 0:  # nothing is trained: a loss is measured
        return x
    return dropout(x, shared.my_shard(p.rows), shared.dropout, seed=shared.seed, step=p.step, site=site)


def vocab_rows(shared: Shared) -> tuple[int, int, int]:
    """(rows this rank's table has, its first row, rows that are in the vocabulary): the last ones may be padding."""
    rows = -(-shared.model.vocab // shared.tp.size)
    first = shared.tp.index * rows
    return rows, first, max(0, min(rows, shared.model.vocab - first))


def table(shared: Shared, name: str) -> nn.Parameter:
    """A [vocab, hidden] matrix split by rows."""
    rows, first, valid = vocab_rows(shared)
    model = shared.model
    part = Part(name, (model.vocab, model.hidden), (first, 0), (slice(0, valid),))
    return shared.make(name, (rows, model.hidden), [part] if valid else [])


class EmbeddingModule(nn.Module):
    """Token (and learned position) embeddings: a look-up in this rank's rows, summed over the ranks."""

    def __init__(self, shared: Shared):
        super().__init__()
        self.shared, model, names = shared, shared.model, shared.names
        self.weight = table(shared, names.embedding)
        self.first = vocab_rows(shared)[1]
        self.positions = None
        if model.learned_positions:
            shape = (model.learned_positions, model.hidden)
            part = Part(names.positions, shape, (0, 0), (slice(None),))
            self.positions = shared.make(names.positions, shape, [part], copies=shared.tp.size, sums=shared.shard_sums)

    def forward(self, p: Pass) -> torch.Tensor:
        shared, tokens = self.shared, p.tokens.T
        if shared.tp.alone:
            x = F.embedding(tokens, self.weight)
        else:
            local = tokens - self.first
            here = (local >= 0) & (local < self.weight.shape[0])
            x = F.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
            x = shared.leave(x * here.unsqueeze(-1).to(x.dtype))
        if self.positions is not None:
            places = p.positions.T if p.positions.dim() == 2 else p.positions.unsqueeze(1)
            x = x + F.embedding(shared.my_shard(places), self.positions)
        return dropped(shared, x, p, 0)


class HeadModule(nn.Module):
    """Final norm, projection to the vocabulary and loss. ``tied``: the embedding on this rank whose table it uses."""

    def __init__(self, shared: Shared, tied: EmbeddingModule | None):
        super().__init__()
        self.shared = shared
        model, names = shared.model, shared.names
        self.norm = None
        if model.head.norm_vectors:
            self.norm = Norm(shared, names.final_norm, model.hidden, model.blocks[-1], sums=shared.shard_sums)
        self._tied = (tied,) if tied is not None else ()
        if tied is None:
            name = names.embedding if model.tied_embeddings else f"{names.head}.weight"
            self.weight = table(shared, name)
        _, self.first, self.valid = vocab_rows(shared)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[S, b, this rank's columns] of hidden states; columns of padding are minus infinity."""
        shared = self.shared
        x = x if self.norm is None else self.norm(x)
        weight = self._tied[0].weight if self._tied else self.weight
        out = shared.enter(x, weight)
        if self.valid < out.shape[-1]:
            padding = torch.arange(out.shape[-1], device=out.device) >= self.valid
            out = out.masked_fill(padding, float("-inf"))
        return out

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss summed over this microbatch's tokens on this context-parallel rank, times ``p.scale``."""
        return cross_entropy(self.logits(x), p.targets.T, self.first, self.shared.tp) * p.scale


__all__ = [
    "AttentionModule",
    "EmbeddingModule",
    "HeadModule",
    "Mlp",
    "Norm",
    "Pass",
    "RowLinear",
    "Shared",
    "copy_to",
    "gather_dim",
]
