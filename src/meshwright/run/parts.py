"""The parts of a decoder transformer for one rank of a plan, built from the :class:`~meshwright.spec.model.Model`:
embedding and head, RMSNorm or LayerNorm, gated or plain MLPs, and what all share. Attention is in
:mod:`.self_attention` and :mod:`.latent`, mixtures of experts are in :mod:`.moe`.

Inside, hidden states are [tokens of the sequence on this rank, batch, hidden]: first the context-parallel part of the
sequence, then, under sequence parallelism and outside tensor-parallel regions, a shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.plan import Plan, lowered
from meshwright.run.activation import activate
from meshwright.run.collect import copy_to, gather_dim, scatter_dim, sum_over
from meshwright.run.compiled import compiled, layer_normed, rms_normed
from meshwright.run.dropout import dropout
from meshwright.run.feedback import DirectFeedback
from meshwright.run.linear import column_parallel, matmul, row_parallel
from meshwright.run.lora.adapters import Adapted, adapters_of, products
from meshwright.run.lora.base import PackedMatrix, times
from meshwright.run.loss import cross_entropy, token_losses
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.parameters import INIT_STD, Maker
from meshwright.run.pieces import Part
from meshwright.run.portions import cuts, later, portion
from meshwright.spec import naming
from meshwright.spec.layers import Block, Dense
from meshwright.spec.model import Model
from meshwright.spec.routing import Routing
from meshwright.spec.workload import FROZEN_BYTES, Lora, Train
from meshwright.sync.policy import read
from meshwright.sync.taught import TAUGHT


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
    different groups of ranks share; () where all of it is shared alike. ``local`` are the cosines and sines of layers
    that slide, where they have their own. ``core`` stands in for the core of every layer's attention where keys and
    values are not those of the pass alone, as in serving: it is called with the layer's
    :class:`~meshwright.run.self_attention.HeadsCore`, q [b, s, heads, d], k and v [b, s, kv_heads, d]. ``moved`` gives
    the embedded text [s, b, hidden] that is gone on with in place of what it is called with; ``moves`` is whether what
    the plan moves of activations is moved in this pass.
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
    local: tuple[torch.Tensor, torch.Tensor] | None = None
    core: Callable[..., torch.Tensor] | None = None
    moved: Callable[[torch.Tensor], torch.Tensor] | None = None
    moves: bool = True


class Lowering:
    """Operators (word, layer) that a rank computes in fewer bits, ``dtype``; they may be others in another step."""

    def __init__(self, dtype: str, chosen: set[tuple[str, int]]):
        self.dtype, self.chosen = dtype, chosen

    @classmethod
    def of(cls, plan: Plan, model: Model) -> Lowering | None:
        """Return what a rank's own plan lowers; None where it lowers nothing."""
        said = lowered.read(plan.kinds.lowered[0]) if plan.kinds.lowered else None
        if said is None:
            return None
        return cls(said.dtype, {(word, i) for i in range(model.num_layers) for word in said.of_layer(i)})


class Shared(NamedTuple):
    """The arguments of all modules of a rank. ``apart``: sums over tensor-parallel ranks are made by who runs the
    modules (:mod:`meshwright.run.overlapped`), which take and give this rank's part. ``node_ranks`` are the devices of
    a node that the plan is for, 0 where all are on one. ``low``: the format that operands of the layers' products are
    rounded to (:mod:`.fp8`), "" for none; ``lowering``: some of the layers' that are cast for it alone, and the
    ``layer`` whose modules are built. ``feedback``: how the output's error enters blocks, if it does."""

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
    low: str = ""
    lowering: Lowering | None = None
    layer: int = -1
    feedback: DirectFeedback | None = None

    def low_of(self, word: str) -> str:
        """The format that operands of an operator of the layer are rounded to, "" for none."""
        if self.lowering is not None and (word, self.layer) in self.lowering.chosen:
            return self.lowering.dtype
        return self.low

    @property
    def tiles(self) -> bool:
        """Whether products go in the steps of a ring with the gathers and sums next to them."""
        return self.sp and self.plan.overlap.tp and not self.plan.overlap.how

    @property
    def routing(self) -> Routing | None:
        """How tokens are said to be routed."""
        return None if self.train is None else self.train.routing

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained over a frozen base, None where all is trained."""
        return None if self.train is None else self.train.lora

    def matrices(self, some: list[nn.Parameter | PackedMatrix]) -> nn.ParameterList | nn.ModuleList:
        """Some matrices as one member of a module."""
        return nn.ModuleList(some) if any(isinstance(one, PackedMatrix) for one in some) else nn.ParameterList(some)

    def matrix(
        self, name: str, shape: tuple[int, int], parts: list[Part], *, std: float = INIT_STD, **held: int
    ) -> nn.Parameter | PackedMatrix:
        """A matrix that tokens are multiplied with, as the plan stores it."""
        stored = self.plan.precision.params
        if self.lora is None or stored not in FROZEN_BYTES:
            return self.make(name, shape, parts, std=std, **held)
        return PackedMatrix(name, shape, parts, stored, std).to(self.make.device)

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

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states inside a tensor-parallel region: whole on every rank; their gradients are parts."""
        if self.apart:
            return x
        return gather_dim(x, self.tp, 0) if self.sp else copy_to(x, self.tp)

    def enter(self, x: torch.Tensor, weight: torch.Tensor, *, low: str = "") -> torch.Tensor:
        """A product of hidden states into a tensor-parallel region, with operands rounded as `low` says."""
        if self.apart:
            return matmul(x, weight, low)
        keep = self.plan.memory.gathered == "kept"
        return column_parallel(x, weight, self.tp, sequence=self.sp, keep=keep, tiles=self.tiles, low=low)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial results out of a tensor-parallel region."""
        return scatter_dim(x, self.tp, 0) if self.sp else sum_over(x, self.tp)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension; in some families the weight is what one is departed from."""

    def __init__(self, shared: Shared, name: str, width: int, block: Block, *, sums: int, eps: float = 0.0):
        super().__init__()
        self.width, self.eps, self.rms = width, eps or shared.model.numerics.norm_eps, block.norm == "rmsnorm"
        copies, self.offset = shared.tp.size, shared.names.unit_offset
        self.compiled = shared.plan.kernels.compile

        def vector(suffix: str, init: str) -> nn.Parameter:
            part = Part(name + suffix, (width,), (0,), (slice(None),))
            return shared.make(name + suffix, (width,), [part], init=init, copies=copies, sums=sums)

        self.weight = vector(".weight", "zeros" if self.offset else "ones") if block.norm_vectors else None
        self.bias = vector(".bias", "zeros") if block.norm_vectors > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled and self.rms:
            return compiled(rms_normed)(x, self.weight, self.eps, self.offset)
        if self.compiled:
            return compiled(layer_normed)(x, self.weight, self.bias, self.eps)
        if self.offset:  # one and a small weight have no room beside each other in 16 bits
            kind = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(kind), (self.width,), 1 + self.weight.to(kind), self.eps).to(x.dtype)
        if self.rms:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RowLinear(nn.Module):
    """A projection out of a tensor-parallel region: this rank's columns, results summed, bias once."""

    def __init__(self, shared: Shared, name: str, inner: int, outer: int, *, bias: bool, target: str = ""):
        """`target`: what LoRA calls the matrix."""
        super().__init__()
        #: The word of the operator that it is.
        self.word = "out" if target == "o" else target
        self.shared = shared
        width = inner // shared.tp.size
        adapted = Adapted(target, name, (outer, inner), (0, shared.tp.index * width), (outer, width))
        self.adapters = adapters_of(shared, [adapted])
        std = INIT_STD / (2 * shared.model.num_layers) ** 0.5
        shape, offset, conv = (outer, inner), (0, shared.tp.index * width), shared.names.conv
        if conv:
            shape, offset = shape[::-1], offset[::-1]
        part = Part(f"{name}.weight", shape, offset, (slice(None),), conv)
        self.weight = shared.matrix(f"{name}.weight", (outer, width), [part], std=std)
        self.bias = None
        if bias:
            part = Part(f"{name}.bias", (outer,), (0,), (slice(None),))
            self.bias = shared.make(
                f"{name}.bias", (outer,), [part], init="zeros", copies=shared.tp.size, sums=shared.shard_sums
            )

    def forward(self, x: torch.Tensor, p: Pass | None = None) -> torch.Tensor:
        if self.shared.lora is not None:
            made = times(x, self.weight, self.shared.low)
            made = made if self.adapters is None else self.adapters.add([made], x, p)[0]
            if self.shared.apart:
                return made
            return self.landed(self.shared.leave(made))
        low = self.shared.low_of(self.word)
        if self.shared.apart:
            return matmul(x, self.weight, low)
        if self.shared.tiles:
            return self.landed(row_parallel(x, self.weight, self.shared.tp))
        return self.landed(self.shared.leave(matmul(x, self.weight, low)))

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
                fused = spec.gated and n.gate_up
                shape = (2 * spec.ffn if fused else spec.ffn, hidden)
                offset = (tp.index * width + (i * spec.ffn if fused else 0), 0)
                if suffix == ".bias":
                    shape, offset = shape[:1], offset[:1]
                elif n.conv:
                    shape, offset = shape[::-1], offset[::-1]
                turned = n.conv and suffix == ".weight"
                rows = (slice(i * width, (i + 1) * width),)
                out.append(Part(f"{prefix}{n.mlp}{n.gate_up if fused else word}{suffix}", shape, offset, rows, turned))
            return out

        rows = width * len(words)
        self.weight = shared.matrix(f"{prefix}{n.mlp}up.weight", (rows, hidden), parts(".weight"))
        at, called = (tp.index * width, 0), ("gate", "up") if spec.gated else ("up",)
        whole, size = (spec.ffn, hidden), (width, hidden)
        named = [(target, f"{prefix}{n.mlp}{word}", i * width) for i, (target, word) in enumerate(zip(called, words))]
        adapted = [Adapted(t, name, whole, at, size, 0, row) for t, name, row in named]
        if spec.gated and n.gate_up:  # one matrix has one adapter
            both, blocks = (2 * spec.ffn, hidden), tuple((i * spec.ffn + at[0], width) for i in range(2))
            adapted = [Adapted("up", f"{prefix}{n.mlp}{n.gate_up}", both, (0, 0), (rows, hidden), blocks=blocks)]
        self.adapters = adapters_of(shared, adapted)
        self.bias = None
        if spec.bias:
            self.bias = shared.make(f"{prefix}{n.mlp}up.bias", (rows,), parts(".bias"), init="zeros")
        self.down = RowLinear(shared, f"{prefix}{n.mlp}{n.down}", spec.ffn, hidden, bias=spec.bias, target="down")

    def forward(self, x: torch.Tensor, p: Pass | None = None) -> torch.Tensor:
        (up,) = products(self.shared, x, [self.weight], self.adapters, p, "up")
        if self.bias is not None:
            up = up + self.bias
        return self.down(activate(up, self.spec, self.shared.plan.kernels.compile), p)


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
        scale = shared.model.numerics.embed_scale
        if scale != 1:
            x = x * float(torch.tensor(scale, dtype=x.dtype))  # rounded as the table is
        if self.positions is not None:
            places = p.positions.T if p.positions.dim() == 2 else p.positions.unsqueeze(1)
            x = x + F.embedding(shared.my_shard(places), self.positions)
        return dropped(shared, x, p, 0)


class HeadModule(nn.Module):
    """Final norm, projection to the vocabulary and loss. ``tied``: the embedding on this rank whose table it uses."""

    def __init__(self, shared: Shared, tied: EmbeddingModule | None):
        super().__init__()
        self.shared = shared
        #: Told the losses [S, b] of every microbatch's tokens, portion by portion, where somebody asks.
        self.told: Callable[[torch.Tensor], None] | None = None
        model, names = shared.model, shared.names
        self.norm = None
        if model.head.norm_vectors or model.head.bare_norm:
            self.norm = Norm(shared, names.final_norm, model.hidden, model.blocks[-1], sums=shared.shard_sums)
        self._tied = (tied,) if tied is not None else ()
        if tied is None:
            name = names.embedding if model.tied_embeddings else f"{names.head}.weight"
            self.weight = table(shared, name)
        #: Heads besides the model's own: of tasks, or those that learn what those of neighbours predict.
        many = range(read(shared.plan.sync.policy).further_heads)
        self.taught = nn.ParameterList(table(shared, f"{TAUGHT}{k}.{names.head}.weight") for k in many)
        rows, self.first, self.valid = vocab_rows(shared)
        self.bias = None
        if model.head.bias:
            name = f"{names.head}.bias"
            part = Part(name, (model.vocab,), (self.first,), (slice(0, self.valid),))
            self.bias = shared.make(name, (rows,), [part] if self.valid else [], init="zeros")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[S, b, this rank's columns] of hidden states; columns of padding are minus infinity."""
        return self.projected(self.normed(x))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden states that are projected."""
        return x if self.norm is None else self.norm(x)

    def projected(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of normed hidden states, by the head's own weight and bias or by another `weight`."""
        shared, bias = self.shared, self.bias if weight is None else None
        own = self._tied[0].weight if self._tied else self.weight
        out = shared.enter(x, own if weight is None else weight)
        out = out if bias is None else out + bias
        if cap := shared.model.numerics.logit_cap:
            out = torch.tanh(out / cap) * cap
        if self.valid < out.shape[-1]:
            padding = torch.arange(out.shape[-1], device=out.device) >= self.valid
            out = out.masked_fill(padding, float("-inf"))
        return out

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss summed over this microbatch's tokens on this context-parallel rank, times ``p.scale``."""
        if self.shared.plan.memory.loss_portions == 1:
            return self.loss(x, p)
        return later(self, x, p, self._tied) if torch.is_grad_enabled() else self.summed(x, p)

    def summed(self, x: torch.Tensor, p: Pass, each: Callable[..., None] | None = None) -> torch.Tensor:
        """The loss, portion by portion; `each` is given the tokens and the loss of every one with its graph."""
        total = 0.0
        for a, b in cuts(x.shape[0], self.shared.plan.memory.loss_portions):
            mine = x[a:b] if each is None else x[a:b].detach().requires_grad_()
            with torch.set_grad_enabled(each is not None):
                loss = self.loss(mine, portion(p, a, b))
            if each is not None:
                each(a, b, mine, loss)
            total = total + loss.detach()
        return total

    def loss(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss of some of the tokens."""
        if self.told is not None:
            losses = token_losses(self.logits(x), p.targets.T, self.first, self.shared.tp)
            self.told(losses)
            return losses.sum() * p.scale
        return cross_entropy(self.logits(x), p.targets.T, self.first, self.shared.tp) * p.scale


__all__ = ["EmbeddingModule", "HeadModule", "Mlp", "Norm", "Pass", "RowLinear", "Shared"]
