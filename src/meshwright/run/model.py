"""A model's stages as modules: layers by the naming scheme of its tensors, with embedding and head at the ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.run.classifier import ClassifierHead, FeatureInput, FeatureLayer, PathLayer, StemModule
from meshwright.run.denoiser import DenoiserEmbedding, DenoiserHead, DenoiserLayer, NoisyClassesHead
from meshwright.run.encoder import EncoderEmbedding, EncoderHead, EncoderLayer
from meshwright.run.hybrid import HybridHead, HybridLayer
from meshwright.run.latent import LatentAttention
from meshwright.run.moe import Mixture
from meshwright.run.overlapped import through, told
from meshwright.run.pair import PairEmbedding, PairHead, PairLayer
from meshwright.run.parallel_block import ParallelBlock
from meshwright.run.parts import (
    EmbeddingModule,
    HeadModule,
    Mlp,
    Norm,
    Pass,
    RowLinear,
    Shared,
    dropped,
)
from meshwright.run.portions import again, cuts, portion
from meshwright.run.self_attention import AttentionModule
from meshwright.run.streams import StreamsBlock
from meshwright.run.task_heads import HybridTaskHeads, TaskHeads
from meshwright.spec import naming
from meshwright.spec.diffusion import NoisyClasses
from meshwright.spec.layers import Block, Moe
from meshwright.sync.policy import read


class BlockModule(nn.Module):
    """One block: x + attention(norm(x)), then + mlp(norm(x)); with norms behind both as well, or behind alone."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        block, prefix = shared.model.block(layer), shared.names.layer.format(layer)
        self.shared, self.layer, self.recompute = shared, layer, recompute
        #: The place behind attention that the output's error enters, None where it does not.
        self.entered = None if shared.feedback is None else shared.feedback.entry(layer, 0)
        before, after = _norm_names(shared.names, block)
        self.attention_norm, self.mlp_norm = (self._norm(prefix, name, block) for name in before)
        kind = LatentAttention if block.attention.kv_lora_rank else AttentionModule
        self.attention = kind(shared, prefix, block.attention, block)
        self.attention.core.drops_core = recompute == "selective"
        self.after_attention, self.after_mlp = (self._norm(prefix, name, block) for name in after)
        if isinstance(block.mlp, Moe):
            self.mlp = Mixture(shared, prefix, block.mlp, layer)
        else:
            self.mlp = Mlp(shared, prefix, block.mlp)

    def _norm(self, prefix: str, name: str, block: Block) -> nn.Module:
        shared = self.shared
        if not name:
            return nn.Identity()
        return Norm(shared, prefix + name, shared.model.hidden, block, sums=shared.shard_sums)

    @property
    def parts(self) -> tuple[BlockPart, BlockPart]:
        """Attention and MLP, to be run in an order of their own."""
        site, out = 2 * self.layer + 1, (self.attention.out, self.mlp.down)
        return (
            BlockPart(self.shared, self.attention_norm, self.attention, out[0], self.after_attention, site),
            BlockPart(self.shared, self.mlp_norm, self.mlp, out[1], self.after_mlp, site + 1),
        )

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            if self.shared.plan.memory.portions > 1:
                return again(self, x, p)
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def whole(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The forward, which only its input is kept of."""
        return self._forward(x, p)

    def back(self, x: torch.Tensor, grad: torch.Tensor, p: Pass, ended: Callable[[], None]) -> torch.Tensor:
        """The gradient of hidden states, portion by portion: keys and values of all tokens first, then the last tokens
        before the first, so that the gradients of a portion's keys and values are whole when it is its turn."""
        parts, attention = cuts(x.shape[0], self.shared.plan.memory.portions), self.attention
        with torch.no_grad():
            made = [attention.projected(self.attention_norm(x[a:b]), portion(p, a, b))[1:] for a, b in parts]
            keys, values = (torch.cat(some, 1) for some in zip(*made))
        del made
        of_keys, of_values, out = torch.zeros_like(keys), torch.zeros_like(values), torch.empty_like(x)
        for a, b in reversed(parts):
            some, mine = portion(p, a, b), x[a:b].requires_grad_()
            with torch.enable_grad():
                q, k, v = attention.projected(self.attention_norm(mine), some)
                asked = [one.detach().requires_grad_() for one in (q, keys[:, :b], values[:, :b])]
                mixed = self.after_attention(attention.of_portion(*asked, a, some))
                y = mine + dropped(self.shared, mixed, some, 2 * self.layer + 1)
                inner = self.after_mlp(self.mlp(self.mlp_norm(y), some))
                y = y + dropped(self.shared, inner, some, 2 * self.layer + 2)
            torch.autograd.backward(y, grad[a:b])
            del y
            of_keys[:, :b] += asked[1].grad
            of_values[:, :b] += asked[2].grad
            torch.autograd.backward((q, k, v), (asked[0].grad, of_keys[:, a:b], of_values[:, a:b]))
            out[a:b] = mine.grad
            ended()
        return out

    def _forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        routed = isinstance(self.mlp, Mixture)
        if routed:
            self.mlp.begin()
            if self.mlp.spec.shortcut:
                return self._around(x, p)
        mixed = self.after_attention(self.attention(self.attention_norm(x), p))
        x = x + dropped(self.shared, mixed, p, 2 * self.layer + 1)
        x = x if self.entered is None else self.entered(x)
        inner = self.mlp_norm(x)
        out = self.after_mlp(self.mlp(inner, p))
        return x + dropped(self.shared, out, p, 2 * self.layer + 2)

    def _around(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """Routed experts read what entered the block: their tokens travel beside attention and shared experts."""
        mixture = self.mlp
        trip = mixture.depart(self.mlp_norm(x), p)
        x = x + dropped(self.shared, self.attention(self.attention_norm(x), p), p, 2 * self.layer + 1)
        trip = mixture.work(trip)
        beside = None if mixture.beside is None else mixture.shared_experts(self.mlp_norm(x))
        out = mixture.arrive(trip)
        return x + dropped(self.shared, out if beside is None else out + beside, p, 2 * self.layer + 2)


def _norm_names(names: naming.Names, block: Block) -> tuple[tuple[str, str], tuple[str, str]]:
    """The names of a block's norms before and behind attention and MLP; "" where there is none."""
    none = ("", "")
    return none if block.norm_after else names.norms, names.after if block.norm_after or block.norms == 4 else none


class BlockPart(NamedTuple):
    """Attention or MLP of a block as a :class:`~meshwright.run.overlapped.LayerPart`."""

    shared: Shared
    norm: nn.Module
    inside: Callable[[torch.Tensor, Pass], torch.Tensor]
    out: RowLinear
    after: nn.Module
    site: int

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The part's input."""
        return self.norm(x)

    def body(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """This rank's partial result."""
        return self.inside(x, p)

    def land(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The summed result as it is added to the stream."""
        return dropped(self.shared, self.after(self.out.landed(x)), p, self.site)


def modules(shared: Shared) -> tuple[type, Callable[[Shared, int, str], nn.Module], type]:
    """The modules of a model's embedding, layers and head, by its naming scheme."""
    merged = read(shared.plan.sync.policy).merged is not None
    match naming.school(shared.model):
        case "mamba2" | "qwen3_5":
            return EmbeddingModule, HybridLayer, HybridTaskHeads if merged else HybridHead
        case "bert":
            return EncoderEmbedding, EncoderLayer, EncoderHead
        case "t5":
            return PairEmbedding, PairLayer, PairHead
        case "resnet" | "vgg":
            return StemModule, PathLayer, ClassifierHead
        case "features":
            return FeatureInput, FeatureLayer, ClassifierHead
        case "dit":
            classes = isinstance(shared.model.head, NoisyClasses)
            return DenoiserEmbedding, DenoiserLayer, NoisyClassesHead if classes else DenoiserHead
    return EmbeddingModule, _decoder_layer, TaskHeads if merged else HeadModule


def _decoder_layer(shared: Shared, layer: int, recompute: str) -> nn.Module:
    """The module of a decoder's layer."""
    block = shared.model.block(layer)
    kind = StreamsBlock if block.ways > 1 else ParallelBlock if block.parallel else BlockModule
    return kind(shared, layer, recompute)


class Stage(nn.Module):
    """A virtual stage: some layers, with the embedding before the first and the head behind the last."""

    def __init__(self, shared: Shared, stage: int, layers: tuple[int, ...], modes: tuple[str, ...], *, first: bool,
                 last: bool, tied: EmbeddingModule | None = None):  # fmt: skip
        super().__init__()
        self.stage, self.first, self.last = stage, first, last
        embedding, layer_of, head = modules(shared)
        self.embedding = embedding(shared) if first else None
        overlap, self.tp = shared.plan.overlap, shared.tp
        #: Slices of the batch in which layers are run part by part, and parts that one does not wait for; None: whole.
        self.order = (overlap.pieces[0], int(not overlap.exact)) if overlap.tp and overlap.how else None
        inside = shared._replace(apart=True) if self.order else shared
        self.layers = nn.ModuleList(
            layer_of(inside._replace(layer=layer), layer, mode) for layer, mode in zip(layers, modes)
        )
        if self.order:
            told(self.layers, self.order[0])
        if last:
            tied = self.embedding if shared.model.tied_embeddings and tied is None else tied
        self.head = head(shared, tied) if last else None
        #: Places behind layers that the output's error enters.
        self.entered = [shared.feedback.entry(layer, 1) for layer in layers] if shared.feedback is not None else []
        memory = shared.plan.memory
        for layer in self.layers if memory.portions > 1 else ():
            told(layer, memory.portions if layer.recompute == "full" else 1)
        if last and memory.loss_portions > 1:
            told(self.head, memory.loss_portions)

    def forward(self, x: torch.Tensor | None, p: Pass) -> torch.Tensor:
        """Hidden states in (None for the first stage), hidden states or the scaled loss out."""
        x = self.hidden(x, p)
        return self.head(x, p) if self.head is not None else x

    def hidden(self, x: torch.Tensor | None, p: Pass) -> torch.Tensor:
        """The hidden states behind the stage's layers."""
        if self.embedding is not None:
            x = self.embedding(p)
            x = x if p.moved is None else p.moved(x)
        if self.order:
            parts = [part for layer in self.layers for part in layer.parts]
            x = through(x, parts, p, self.tp, count=self.order[0], lag=self.order[1])
        for place, layer in enumerate(self.layers) if not self.order else ():
            out = layer(x, p)
            x = layer.merge(x, out) if hasattr(layer, "merge") else out  # of several streams one has changed
            x = self.entered[place](x) if self.entered else x
        return x
