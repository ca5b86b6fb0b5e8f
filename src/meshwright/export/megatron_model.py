"""A model as Megatron-LM's flags: its layers, attention, experts and embeddings, and what of them it has no flag for.

Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053; Narayanan et al., 2021, arXiv 2104.04473) has no list of models;
its GPT is one stack of alike layers whose attention may alternate a window and whose MLP may alternate with experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec

from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.spec.layers import Attention, Block, Dense, Moe
from meshwright.spec.model import Model

#: Family -> its gated activation where that is not silu: gpt-oss (2508.10925) multiplies x sigmoid(1.702 x) with its
#: other half plus 1, both clamped at 7.
GATES: dict[str, dict[str, object]] = {
    "gpt_oss": {"--quick-geglu": True, "--activation-func-clamp-value": 7.0, "--glu-linear-offset": 1.0}
}
Flags = dict[str, object]
"""Flag -> its value: True alone, else as text, several values as a tuple."""


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Everything in the model that no flag says."""
    model = r.model
    if not model.is_decoder:
        what = "a stack of attention and MLP between one vocabulary's embedding and head, which this is not"
        yield Gap(facet="model", value=model.name, reason=f"its decoder is {what}")
        return
    reasons = [*_stack(model), *_ends(model)]
    for block in model.blocks:
        reasons += [*_block(block), *_attention(block.attention), *_mlp(block)]
    for reason in dict.fromkeys(reasons):
        yield Gap(facet="model", value=model.name, reason=reason)


def _stack(model: Model) -> Iterator[str]:
    first = model.blocks[0]
    alike = {msgspec.structs.replace(b.attention, window=0) for b in model.blocks}
    if len(alike) > 1:
        yield "its layers share one attention but for the window, and these differ in more"
    if len({b.attention.window for b in model.blocks}) > 2 or (
        len({b.attention.window for b in model.blocks}) == 2 and all(b.attention.window for b in model.blocks)
    ):
        yield "its layers attend to one window or to everything, and these have several windows"
    for kind in (Dense, Moe):
        if len({b.mlp for b in model.blocks if isinstance(b.mlp, kind)}) > 1:
            yield "its layers share one MLP and one kind of experts, and these have several"
    if any((b.norm, b.norms, b.norm_vectors) != (first.norm, first.norms, first.norm_vectors) for b in model.blocks):
        yield "its layers share one kind of norm"


def _ends(model: Model) -> Iterator[str]:
    if model.embedding.norm_vectors:
        yield "it puts no norm behind the embedding"
    if model.embedding.width:
        yield "its embedding is as wide as its layers"
    if model.head.bias:
        yield "it gives the head no bias"
    if not model.head.norm_vectors and model.blocks[0].norm_vectors:
        yield "it puts a norm before the head"


def _block(block: Block) -> Iterator[str]:
    if block.parallel:
        yield "attention and MLP follow each other in its layers, they do not run side by side"
    elif block.norms != 2:
        yield f"its layers have two norms, these {block.norms}"
    if block.norm_vectors != (1 if block.norm == "rmsnorm" else 2):
        yield "its norms have a weight each, LayerNorm a bias as well"
    if block.scale_params:
        yield "its layers have no learned scales beside weights and norms"


def _attention(a: Attention) -> Iterator[str]:
    if a.chunked:
        yield "its windows slide, they do not tile the sequence"
    if a.index_heads or a.index_top_k:
        yield "it has no indexer that picks tokens"
    if a.key_as_value:
        yield "values have a projection of their own"
    if not a.kv_lora_rank and a.v_head_dim != a.head_dim:
        yield "keys and values are equally wide"
    if (a.out_bias, a.qkv_bias) not in ((False, False), (True, True), (False, True)):
        yield "its output projection has a bias only where all projections have one"
    if a.qk_norm_params not in (0, 2 * a.head_dim) and not a.kv_lora_rank:
        yield "its norms on queries and keys are as wide as a head"
    if a.kv_lora_rank and (a.qkv_bias or a.out_bias):
        yield "latent attention has no biases"


def _mlp(block: Block) -> Iterator[str]:
    mlp = block.mlp
    usual = ("silu",) if mlp.gated else ("gelu", "gelu_new", "gelu_pytorch_tanh")
    if mlp.activation not in usual:
        yield f"a {'gated' if mlp.gated else 'plain'} MLP has {usual[0]}, not {mlp.activation}"
    if mlp.bias != block.attention.out_bias:
        yield "MLP and output projection have biases both or neither"
    if isinstance(mlp, Moe) and mlp.bias and not mlp.router_bias:
        yield "its routers have a bias where its experts have one"


def flags(r: ExportRequest) -> Flags:
    """The flags of the model, in the order of Megatron-LM's own groups."""
    model, block = r.model, r.model.blocks[0]
    out: Flags = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": _ffn(model),
        "--num-attention-heads": block.attention.heads,
        **_heads(model),
        "--max-position-embeddings": model.learned_positions or max(model.max_seq_len, r.train.seq_len),
        "--position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "--normalization": "RMSNorm" if block.norm == "rmsnorm" else "LayerNorm",
        "--padded-vocab-size": padded_vocab(r),
    }
    if not block.attention.rotary and not model.learned_positions:
        out["--position-embedding-type"] = "none"
    out |= GATES.get(model.family, {"--swiglu": True}) if block.mlp.gated else {}
    if not block.attention.out_bias:
        out["--disable-bias-linear"] = True
        if block.attention.qkv_bias:
            out["--add-qkv-bias"] = True
    if not model.tied_embeddings:
        out["--untie-embeddings-and-output-weights"] = True
    return {**out, **_windows(model), **_experts(model)}


def padded_vocab(r: ExportRequest) -> int:
    """Rows of the embedding: the model's, and a few more where tp does not divide them."""
    return -(-r.model.vocab // r.layout.tp) * r.layout.tp


def _ffn(model: Model) -> int:
    dense = next((b.mlp.ffn for b in model.blocks if isinstance(b.mlp, Dense)), None)
    return dense or model.blocks[0].mlp.ffn


def _heads(model: Model) -> Flags:
    a = model.blocks[0].attention
    if a.kv_lora_rank:
        return _latent(a)
    out: Flags = {}
    if a.head_dim * a.heads != model.hidden:
        out["--kv-channels"] = a.head_dim
    if a.kv_heads != a.heads:
        out |= {"--group-query-attention": True, "--num-query-groups": a.kv_heads}
    if a.qk_norm:
        out["--qk-layernorm" if a.qk_norm_params else "--qk-l2-norm"] = True
    if a.sinks:
        out["--softmax-type"] = "learnable"
    return out


def _latent(a: Attention) -> Flags:
    query: Flags = {"--q-lora-rank": a.q_lora_rank} if a.q_lora_rank else {}
    return {
        "--multi-latent-attention": True,
        **query,
        "--kv-lora-rank": a.kv_lora_rank,
        "--qk-head-dim": a.head_dim - a.rope_head_dim,
        "--qk-pos-emb-head-dim": a.rope_head_dim,
        "--v-head-dim": a.v_head_dim,
        # the norms on the latents
        "--qk-layernorm": True,
    }


def _windows(model: Model) -> Flags:
    """A window of W tokens is the token itself and W - 1 before it."""
    windows = [model.block(layer).attention.window for layer in range(model.num_layers)]
    widest = max(windows)
    if not widest:
        return {}
    out: Flags = {"--window-size": f"{widest - 1},0"}
    if not all(windows):
        out["--window-attn-skip-freq"] = pattern([int(w > 0) for w in windows])
    return out


def _experts(model: Model) -> Flags:
    mixture = next((b.mlp for b in model.blocks if isinstance(b.mlp, Moe)), None)
    if mixture is None:
        return {}
    out: Flags = {
        "--num-experts": mixture.experts,
        "--moe-router-topk": mixture.top_k,
        "--moe-ffn-hidden-size": mixture.ffn,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }
    if mixture.shared_ffn:
        out["--moe-shared-expert-intermediate-size"] = mixture.shared_ffn
        if mixture.shared_gate:
            out["--moe-shared-expert-gate"] = True
    if mixture.bias:
        # with linear biases its routers learn one, and its grouped experts add theirs on their own
        out["--no-bias-dropout-fusion"] = True
    elif mixture.router_bias:
        # the bias of auxiliary-loss-free balancing, which goes with scores by sigmoid (2408.15664)
        out |= {"--moe-router-enable-expert-bias": True, "--moe-router-score-function": "sigmoid"}
    where = [int(isinstance(model.block(layer).mlp, Moe)) for layer in range(model.num_layers)]
    if not all(where):
        out["--moe-layer-freq"] = pattern(where)
    return out


def pattern(values: list[int]) -> str:
    """A list as the Python expression that Megatron-LM evaluates: ``([0]*3+[1]*58)``."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"
