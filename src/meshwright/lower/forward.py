"""The forward pass of a serving iteration: the pieces of every layer at so many tokens, and attention apart from them.

What a layer does to tokens one by one (products, norms, activations, the sums over tensor-parallel ranks) depends on
how many there are; attention depends on every request's new tokens and context. The two are priced apart and added.
Hidden states are whole on every tensor-parallel rank, experts are split by their inner width, and the head computes
sampled tokens alone, as serving engines do.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec

from meshwright import layers
from meshwright.layers.attention import kv_heads
from meshwright.layers.head import logits
from meshwright.layers.pieces import Context, Piece, leave
from meshwright.lower.layer import Entry, program
from meshwright.lower.partition import stage_layers
from meshwright.lower.place import Mesh
from meshwright.lower.state import params_of
from meshwright.plan import Experts, Plan
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.items import Item
from meshwright.spec.layers import Attention as Spec
from meshwright.spec.layers import Block, Moe
from meshwright.spec.model import Model
from meshwright.spec.serve import KV_BYTES
from meshwright.spec.workload import DTYPE_BYTES, Train
from meshwright.work import AttentionCore, Collective, Elementwise, GroupedGemm, VarlenAttention, Work, pairs


class Mixing(NamedTuple):
    """One kind of attention, and how many layers have it."""

    spec: Spec
    layers: int


class Forward:
    """The forward pass of a model under a plan, on one of its replicas. ``kv`` is the precision of the cache."""

    def __init__(self, model: Model, plan: Plan, mesh: Mesh, kv: str = "bf16"):
        plan = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, sp=False))
        self.model, self.plan, self.mesh, self.kv = model, plan, mesh, kv
        alone = msgspec.structs.replace(plan, experts=Experts(ep=1, etp=1))
        self.train = Train(global_batch=1, seq_len=1, dtype=plan.precision.compute or "bf16")
        self._alone = alone

    def context(self, tokens: int, *, split_experts: bool = False) -> Context:
        """Return the sizes and groups of the ranks at work on so many tokens."""
        none = self.mesh.group()
        return Context.of(
            self.model.head.stream,
            ((Item(1, 1.0), tokens),),
            self.model,
            self.plan if split_experts else self._alone,
            self.train,
            tp_group=self.mesh.group("tp"),
            cp_inner=none,
            cp_outer=none,
            ep_group=none,
            etp_group=none,
        )

    def tokenwise(self, kind: int, tokens: int) -> list[Entry]:
        """Return the operators of a layer on so many tokens, in order, without its attention core."""
        c, layer = self.context(tokens), self.model.layer(kind)
        pieces = layers.of(layer).pieces(c, layer) if kind == EMBEDDING else self._block(c, layer)
        entries = program(pieces, "F")
        return [e for e in _chained(entries) if not isinstance(e.work, AttentionCore | VarlenAttention)]

    def _block(self, c: Context, block: Block) -> list[Piece]:
        """Return the pieces of a block; experts' products are split by their width, and their outputs summed once."""
        moe = block.mlp
        if not isinstance(moe, Moe):
            return layers.of(block).pieces(c, block)
        split = msgspec.structs.replace(block, mlp=msgspec.structs.replace(moe, ffn=-(-moe.ffn // c.tp)))
        pieces = [_touched(piece, moe, c.tokens) for piece in layers.of(split).pieces(c, split)]
        return pieces if moe.shared_ffn else [*pieces, *leave(c, "experts")]

    def head(self, tokens: int) -> list[Entry]:
        """Return the operators that turn the last hidden states of so many requests into tokens."""
        return program(logits(self.context(tokens), self.model.head), "F")

    def send(self, tokens: int) -> Collective | None:
        """Return the message of hidden states to the next pipeline stage; None where there is none."""
        if self.plan.layout.pp == 1:
            return None
        c = self.context(tokens)
        pair = self.mesh.pair(0, self.plan.layout.stride("pp"))
        return Collective(op="send", num_bytes=tokens * c.hidden * c.element, group=pair)

    @cached_property
    def mixing(self) -> tuple[Mixing, ...]:
        """The distinct kinds of attention."""
        count: dict[Spec, int] = {}
        for kind, times in enumerate(self.model.layers_by_kind):
            for spec in self.model.blocks[kind].attentions:
                count[spec] = count.get(spec, 0) + times
        return tuple(Mixing(spec, times) for spec, times in count.items())

    def core(self, spec: Spec, batch: int, new: int, past: int) -> Work:
        """Return the attention of `batch` requests that compute `new` tokens each behind `past` others on a rank."""
        c, heads = self._one, spec.heads // self.plan.layout.tp
        window = min(spec.window, spec.index_top_k) if spec.window and spec.index_top_k else 0
        window = window or spec.window or spec.index_top_k
        kv, width, v_width = kv_heads(c, spec), spec.head_dim, spec.v_head_dim
        if spec.kv_lora_rank:
            # decoding reads the latent once for all heads (DeepSeek-V2, 2405.04434, section 2.1.2); prompts expand it
            kv = 1 if new == 1 else heads
            width, v_width = (
                (spec.kv_lora_rank + spec.rope_head_dim, spec.kv_lora_rank) if new == 1 else (width, v_width)
            )
        return AttentionCore(
            batch=batch,
            q_len=new,
            kv_len=past + new,
            heads=heads,
            kv_heads=min(heads, kv),
            head_dim=width,
            v_head_dim=v_width,
            pairs=pairs(new, past + new, causal=True, window=window),
            dtype="fp8" if self.kv == "fp8" and new == 1 else c.attention_dtype,
        )

    @cached_property
    def _one(self) -> Context:
        return self.context(1)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of the layers of every pipeline stage, with the embedding and the head."""
        held = [[self.model.pattern[layer] for layer in stage] for stage in stage_layers(self.plan, self.model)]
        return tuple(
            (*((EMBEDDING,) if i == 0 else ()), *kinds, *((HEAD,) if i == len(held) - 1 else ()))
            for i, kinds in enumerate(held)
        )

    def weight_bytes(self, stage: int) -> float:
        """Return the bytes of the weights that a rank of a stage holds; below 16 bits only quantised ones."""
        c, low = self.context(1, split_experts=True), DTYPE_BYTES[self.train.dtype]
        total = 0.0
        for kind in self.stages[stage]:
            params = params_of(c, self.model.layer(kind))
            total += (params.dense + params.expert) * c.element
            total -= params.low * (c.element - low) if low < c.element else 0.0
        return total

    def kv_bytes(self, stage: int) -> float:
        """Return the bytes that a rank of a stage keeps of one token: keys and values of its heads, or the latent."""
        total = 0.0
        for kind in self.stages[stage]:
            if kind < 0:
                continue
            for spec in self.model.blocks[kind].attentions:
                share = 1.0 if spec.kv_lora_rank else kv_heads(self._one, spec) / spec.kv_heads
                total += layers.of(spec).state(spec).per_token * share
        return total * KV_BYTES[self.kv]

    def workspace_bytes(self, tokens: int, sampled: int) -> float:
        """Return the most bytes that an iteration's activations take: the two widest results of a layer beside the
        hidden states and their copy, or the scores over the vocabulary in 16 and 32 bits."""
        c = self.context(max(1, tokens))
        widest = 0.0
        for block in self.model.blocks:
            outputs = sorted((sum(p.outputs) for p in self._block(c, block)), reverse=True)
            widest = max(widest, sum(outputs[:2]))
        hidden = 2.0 * tokens * c.hidden * c.element
        return max(hidden + widest, hidden + sampled * self.model.vocab * (4.0 + c.element))


def _chained(entries: list[Entry]) -> list[Entry]:
    """Return the entries without attention cores, each after the one before it, so that these leave no gap."""
    kept = [e for e in entries if not isinstance(e.work, AttentionCore | VarlenAttention)]
    return [e._replace(after=(i - 1,) if i else ()) for i, e in enumerate(kept)]


def _touched(piece: Piece, moe: Moe, tokens: int) -> Piece:
    """A product of experts reads the weights of those that any token is routed to: with k of E drawn evenly by n
    tokens, E (1 - (1 - k/E)^n) of them on average. Their operands are quantised by one kernel, where training has one
    for each expert."""
    work = piece.forward
    if isinstance(work, Elementwise) and work.kernels == moe.experts:
        return msgspec.structs.replace(piece, forward=msgspec.structs.replace(work, kernels=1))
    if not isinstance(work, GroupedGemm):
        return piece
    share = 1.0 - (1.0 - moe.top_k / moe.experts) ** tokens
    groups = max(1, min(moe.experts, round(moe.experts * share)))
    return msgspec.structs.replace(piece, forward=msgspec.structs.replace(work, groups=groups))
