"""The layers of a model: softmax attention, dense or expert MLP, and the block that joins parts to a layer.

Each record holds the dimensions that decide weights, operations and cache, and counts its own parameters
exactly as the published checkpoint stores them. Multi-head attention is Vaswani et al. (2017, 1706.03762),
multi-query and grouped-query Shazeer (2019, 1911.02150) and Ainslie et al. (2023, 2305.13245), multi-head latent
attention DeepSeek-V2 (2024, 2405.04434), sparse attention with an indexer DeepSeek-V3.2 (2025, 2512.02556),
low-rank queries over one shared key-value head Multi-matrix Factorization Attention (2024, 2412.19255), gated
MLPs Shazeer (2020, 2002.05202), and shared beside routed experts DeepSeekMoE (2024, 2401.06066).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention: multi-head, grouped-query, multi-query, or latent (``kv_lora_rank > 0``).

    Attributes:
        heads: query heads.
        kv_heads: key-value heads; equal to `heads` for latent attention, which keeps one latent for all.
        head_dim: width of q.k per head; for latent attention the part without position plus the rotary part.
        v_head_dim: width of the values per head.
        window: tokens that a query sees: a sliding window, or a chunk when `chunked`; 0 = full causal.
        chunked: `window` tiles the sequence into chunks (Llama 4) instead of sliding over it.
        q_lora_rank: width of the compressed query, 0 = queries are projected directly.
        kv_lora_rank: width of the latent that replaces keys and values in the cache, 0 = not latent.
        rope_head_dim: latent attention: width of the rotary key shared by all heads.
        qkv_bias: biases on the projections of query, key and value (latent: on both down-projections).
        out_bias: bias on the output projection.
        qk_norm: queries and keys are normalised before their product.
        qk_norm_params: learned weights of those two norms together; 0 when they have none (Llama 4).
        sinks: one learned logit per head joins the softmax (gpt-oss).
        rotary: positions are rotated into queries and keys.
        key_as_value: the values reuse the key projection (Gemma 4 global layers).
        index_heads: sparse attention: heads of this layer's own indexer, 0 = none or another layer's choice.
        index_head_dim: width of an indexer head.
        index_top_k: sparse attention: tokens that a query attends to, 0 = all in its window.
        gated: a gate as wide as the queries, projected with them, scales the output (Qwen3-Next).
        position_params: learned numbers that are added to scores by distance (T5), in this layer.
        over: the dim of a video that tokens attend over, ``space`` or ``time``; "" = all tokens.
        kv_inputs: width of what keys and values are made of where another stream has another one, 0 = the model's.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary: bool
    window: int = 0
    chunked: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_params: int = 0
    sinks: bool = False
    key_as_value: bool = False
    index_heads: int = 0
    index_head_dim: int = 0
    index_top_k: int = 0
    gated: bool = False
    position_params: int = 0
    over: str = ""
    kv_inputs: int = 0

    @property
    def normed_over_all(self) -> bool:
        """Whether the norms of queries and keys have a weight for every head of theirs (OLMo 2), not one for all."""
        return self.qk_norm_params == (self.heads + self.kv_heads) * self.head_dim > 2 * self.head_dim

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that one token leaves in this layer's cache (keys and values, or the latent and its rotary key;
        the indexer's key with either)."""
        if self.kv_lora_rank:
            cached = self.kv_lora_rank + self.rope_head_dim
        else:
            cached = self.kv_heads * (self.head_dim + self.v_head_dim)
        return cached + (self.index_head_dim if self.index_heads else 0)

    def num_params(self, hidden: int) -> int:
        """Parameters of this attention in a model of width `hidden`, norms on queries and keys included."""
        kv = self._latent_kv_params(hidden) if self.kv_lora_rank else self.kv_params(self.kv_inputs or hidden)
        out = self.heads * self.v_head_dim * hidden + (hidden if self.out_bias else 0)
        sinks = self.heads if self.sinks else 0
        extra = sinks + self.qk_norm_params + self.position_params
        return self._query_params(hidden) + kv + out + extra + self._indexer_params(hidden)

    def _query_params(self, hidden: int) -> int:
        if not self.q_lora_rank:
            biased = self.qkv_bias and not self.kv_lora_rank
            return (hidden + (1 if biased else 0)) * self.q_width * (2 if self.gated else 1)
        # down-projection, its norm, up-projection; a bias sits on the down-projection alone
        norm_and_bias = self.q_lora_rank * (2 if self.qkv_bias else 1)
        return hidden * self.q_lora_rank + norm_and_bias + self.q_lora_rank * self.q_width

    def kv_params(self, hidden: int) -> int:
        """Return the parameters of the projections of keys and values from inputs of this width."""
        width = self.kv_heads * (self.head_dim if self.key_as_value else self.head_dim + self.v_head_dim)
        return (hidden + (1 if self.qkv_bias else 0)) * width

    def _latent_kv_params(self, hidden: int) -> int:
        down = (hidden + (1 if self.qkv_bias else 0)) * (self.kv_lora_rank + self.rope_head_dim)
        up_width = self.heads * (self.head_dim - self.rope_head_dim + self.v_head_dim)
        return down + self.kv_lora_rank + self.kv_lora_rank * up_width

    def _indexer_params(self, hidden: int) -> int:
        if not self.index_heads:
            return 0
        query = (self.q_lora_rank or hidden) * self.index_heads * self.index_head_dim
        key_and_its_layernorm = (hidden + 2) * self.index_head_dim
        return query + key_and_its_layernorm + hidden * self.index_heads


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """The MLP that every token passes: two matrices, or three when `gated`; `ffn` is its inner width."""

    ffn: int
    gated: bool
    activation: str
    bias: bool = False

    def num_params(self, hidden: int) -> int:
        """Parameters of this MLP in a model of width `hidden`."""
        return _mlp_params(hidden, self.ffn, self.gated, self.bias)


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: a router sends each token to `top_k` of `experts` MLPs of inner width `ffn`.

    Attributes:
        shared_ffn: total inner width of the experts that every token passes, 0 = none.
        bias: biases inside the experts.
        router_bias: one learned number per expert beside the router matrix (a bias, or the selection bias
            of auxiliary-loss-free balancing, 2408.15664).
        shared_gate: a learned gate scales the shared experts' output (Qwen2-MoE).
        shortcut: routed experts read what entered the block, before its attention, and shared ones what left that
            (ScMoE, 2404.05019): another model, whose exchange of tokens needs not wait for attention.
        latent: width in which routed experts read and write, into which one matrix takes every token and out of which
            another takes the sum of its experts; 0 = the model's own (LatentMoE, Nemotron 3, 2512.20848).
    """

    experts: int
    top_k: int
    ffn: int
    gated: bool
    activation: str
    shared_ffn: int = 0
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    shortcut: bool = False
    latent: int = 0

    def width(self, hidden: int) -> int:
        """Width of what routed experts read and write, which is what travels to them."""
        return self.latent or hidden

    def expert_params(self, hidden: int) -> int:
        """Parameters of one routed expert."""
        return _mlp_params(self.width(hidden), self.ffn, self.gated, self.bias)

    def shared_params(self, hidden: int) -> int:
        """Parameters of the shared experts together."""
        return _mlp_params(hidden, self.shared_ffn, self.gated, self.bias) if self.shared_ffn else 0

    def router_params(self, hidden: int) -> int:
        """Parameters of the router, of the gate on the shared experts, and of the ways into the experts' own width and
        back."""
        ways = 2 * hidden * self.latent + (hidden + self.latent if self.bias else 0) if self.latent else 0
        return (hidden + (1 if self.router_bias else 0)) * self.experts + (hidden if self.shared_gate else 0) + ways

    def num_params(self, hidden: int) -> int:
        """Parameters of the whole mixture in a model of width `hidden`."""
        routed = self.experts * self.expert_params(hidden)
        return routed + self.shared_params(hidden) + self.router_params(hidden)


def _mlp_params(hidden: int, ffn: int, gated: bool, bias: bool) -> int:
    into = 2 if gated else 1
    return (into + 1) * hidden * ffn + (into * ffn + hidden if bias else 0)


class BlockParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one block by part: `attention` is what mixes tokens, `mlp` the dense MLP or the shared experts,
    `experts` all routed ones, `norm` the norms of width hidden and the block's other learned scales."""

    attention: int
    mlp: int
    norm: int
    router: int
    experts: int

    @property
    def total(self) -> int:
        """All parameters of the block."""
        return self.attention + self.mlp + self.norm + self.router + self.experts


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a model: parts one after the other, each with a norm before it and added to what came in.

    Attributes:
        before: what stands between the stacks before this layer, or before its parts, without a norm of the block's.
        mixer: what mixes tokens in place of attention (:mod:`meshwright.spec.mixers`, or a kind of one's own).
        attention: softmax attention, None = none.
        cross: softmax attention whose keys and values are another stream's tokens, None = none.
        mlp: dense, a mixture of experts, or a kind of one's own; None = none.
        norms: norms of width hidden in the block (two in most, one where both paths share it, four in Gemma 2: before
            and behind each path).
        norm_after: the two norms are behind attention and MLP, none is before them (OLMo 2).
        norm_vectors: learned vectors per norm: 1 weight, 2 with bias, 0 without either (OLMo).
        parallel: attention and MLP read the same input and are added together (GPT-J, NeoX, Falcon, Phi).
        scale_params: learned scales outside all of these (Gemma 4's router).
        ways: parts of the block with a residual stream of their own, one a tensor-parallel rank; the sum of what their
            MLPs found is read by all MLPs of the next block (Kraken, 2408.07802). 1 = there is one stream.
        stream: whose tokens pass.
        source: whose tokens `cross` reads.
        locked: its parameters are not trained, and gradients pass it to layers before it that are (the up path of a
            U-Net behind a ControlNet, 2302.05543).
    """

    attention: Attention | None = None
    mlp: Dense | Moe | msgspec.Struct | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norms: int = 2
    norm_after: bool = False
    norm_vectors: int = 1
    parallel: bool = False
    scale_params: int = 0
    mixer: msgspec.Struct | None = None
    cross: Attention | None = None
    before: tuple[msgspec.Struct, ...] = ()
    ways: int = 1
    stream: int = 0
    source: int = 0
    locked: bool = False

    @property
    def parts(self) -> tuple[msgspec.Struct, ...]:
        """All parts in the order in which they run."""
        found = (*self.before, self.mixer, self.attention, self.cross, self.mlp)
        return tuple(part for part in found if part is not None)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The parts that are softmax attention."""
        return tuple(part for part in (self.attention, self.cross) if part is not None)

    @property
    def reads(self) -> tuple[int, ...]:
        """Streams whose tokens the layer needs."""
        ended = [s for part in self.before for s in getattr(part, "reads", (getattr(part, "stream", self.stream),))]
        return tuple(dict.fromkeys([self.stream, *ended, *([self.source] if self.cross is not None else [])]))

    @property
    def _biases(self) -> int:
        """Biases of a stream's width: those that lead back into it."""
        return sum(bool(said) for part in (*self.attentions, self.mlp) for said in [_out_bias(part)])

    def params(self, hidden: int) -> BlockParams:
        """The block's parameters by part, in a model of width `hidden`; without what stands before its parts."""
        mixing = [part for part in (self.mixer, self.attention, self.cross) if part is not None]
        attention = sum(part.num_params(hidden) for part in mixing)
        norm = self.norms * self.norm_vectors * hidden * self.ways + self.scale_params
        norm += (self.ways - 1) * hidden * self._biases
        mlp = self.mlp
        if not isinstance(mlp, Moe):
            dense = mlp.num_params(hidden) if mlp is not None else 0
            return BlockParams(attention=attention, mlp=dense, norm=norm, router=0, experts=0)
        return BlockParams(
            attention=attention,
            mlp=mlp.shared_params(hidden),
            norm=norm,
            router=mlp.router_params(hidden),
            experts=mlp.experts * mlp.expert_params(hidden),
        )


def _out_bias(part: object) -> bool:
    """Whether a part's last product has a bias."""
    return part.out_bias if isinstance(part, Attention) else isinstance(part, Dense) and part.bias
