"""State: what every rank holds, by kind and bytes, from the layout of parameters, gradients, optimizer, activations.

ZeRO's stages (Rajbhandari et al. 1910.02054) shard, from the outside in, the optimizer, the gradients, the
parameters. Activation bytes come from the same pieces that give the time (``layers/pieces.py``); for a GPT block
they add up to Korthikanti et al. (2205.05198): sbh(34 + 5as/h) without recompute.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.pieces import Context, Piece
from meshwright.lower.operators import kept_bytes
from meshwright.plan import Plan
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model
from meshwright.spec.workload import DTYPE_BYTES, OPTIMIZER_MOMENTS, STORED_BYTES, Train


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters one rank holds of a stage before any ZeRO sharding: ``dense`` reduced over dp*cp, ``expert`` over
    the expert mesh's replicas; the ``trained`` ones have gradients and optimizer state; ``low`` of the dense and
    expert ones are multiplied below 16 bits when the precision says so."""

    dense: float = 0.0
    expert: float = 0.0
    trained_dense: float = 0.0
    trained_expert: float = 0.0
    low: float = 0.0

    def __add__(self, other: Params) -> Params:
        return Params(
            dense=self.dense + other.dense,
            expert=self.expert + other.expert,
            trained_dense=self.trained_dense + other.trained_dense,
            trained_expert=self.trained_expert + other.trained_expert,
            low=self.low + other.low,
        )


def block_params(plan: Plan, model: Model, train: Train, kind: int) -> Params:
    """One block's parameters on one rank."""
    block, tp = model.blocks[kind], plan.layout.tp
    parts = block.params(model.hidden)
    replicated = parts.norm + parts.router + _replicated_attention(model, kind)
    split = parts.attention - _replicated_attention(model, kind) + parts.mlp
    dense = split / tp + replicated + _repeated_heads(model, kind, tp)
    expert = parts.experts / (plan.experts.ep * plan.etp) if isinstance(block.mlp, Moe) else 0.0
    low = dense - replicated + expert
    if train.lora is None:
        return Params(dense=dense, expert=expert, trained_dense=dense, trained_expert=expert, low=low)
    adapters = lora_params(model, train, kind) / tp
    return Params(dense=dense + adapters, expert=expert, trained_dense=adapters, low=low)


def _replicated_attention(model: Model, kind: int) -> float:
    """Latent down-projections and their norms are whole on every tensor-parallel rank."""
    a = model.blocks[kind].attention
    if not a.kv_lora_rank:
        return 0.0
    down = a.q_lora_rank + a.kv_lora_rank + a.rope_head_dim
    return float(model.hidden * down + a.q_lora_rank + a.kv_lora_rank)


def _repeated_heads(model: Model, kind: int, tp: int) -> float:
    """Key-value projections beyond a rank's share: where tp exceeds the heads, every rank holds a whole one."""
    a = model.blocks[kind].attention
    if a.kv_lora_rank or a.kv_heads >= tp:
        return 0.0
    per_head = (model.hidden + int(a.qkv_bias)) * (a.head_dim + (0 if a.key_as_value else a.v_head_dim))
    return per_head * (1 - a.kv_heads / tp)


def lora_params(model: Model, train: Train, kind: int) -> float:
    """Adapter parameters of one block: rank * (inputs + outputs) of every target matrix it has."""
    block, h, r = model.blocks[kind], model.hidden, train.lora.rank
    a, widths = block.attention, []
    for target in train.lora.targets:
        if target in ("gate", "up", "down"):
            mlp = block.mlp
            ffn = mlp.shared_ffn if isinstance(mlp, Moe) else mlp.ffn
            if ffn and (target != "gate" or mlp.gated):
                widths.append(h + ffn)
        else:
            out = {
                "q": a.heads * a.head_dim,
                "k": a.kv_heads * a.head_dim,
                "v": a.kv_heads * a.v_head_dim,
                "o": a.heads * a.v_head_dim,
            }[target]
            widths.append(h + out)
    return float(r * sum(widths))


def embedding_params(plan: Plan, model: Model, train: Train) -> Params:
    table = model.vocab * (model.embedding_width or model.hidden)
    dense = table / plan.layout.tp + (model.embedding_params - table)
    return Params(dense=dense, trained_dense=0.0 if train.lora else dense)


def head_params(plan: Plan, model: Model, train: Train, *, shares_embedding: bool) -> Params:
    """Final norm and head. A tied head on another rank than the embedding holds its own copy of the table."""
    own = model.head_params / plan.layout.tp
    if model.tied_embeddings and not shares_embedding:
        own += model.vocab * (model.embedding_width or model.hidden) / plan.layout.tp
    dense = own + model.final_norm_params
    return Params(dense=dense, trained_dense=0.0 if train.lora else dense)


def static_bytes(plan: Plan, train: Train, params: Params) -> dict[str, float]:
    """Bytes of a rank's constant state by category."""
    layout, precision = plan.layout, plan.precision
    compute = precision.compute or train.dtype
    shard = {"dense": layout.shard_group, "expert": min(layout.shard or plan.edp, plan.edp)}
    weight = 4.0 if compute == "fp32" else 2.0
    master = 0.0 if compute == "fp32" else STORED_BYTES[precision.master]
    moments = OPTIMIZER_MOMENTS[train.optimizer] * STORED_BYTES[precision.moments]
    grads = STORED_BYTES[precision.grads]
    out = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for part, trained in (("dense", params.trained_dense), ("expert", params.trained_expert)):
        held = getattr(params, part)
        n = shard[part]
        if layout.zero == 3:
            # the sharded copy is the master; the working copy is gathered when needed
            kept = master if master else weight
            out["parameters"] += (trained * kept + (held - trained) * weight) / n
            out["optimizer"] += trained * moments / n
        else:
            out["parameters"] += held * weight
            out["optimizer"] += trained * (master + moments) / (n if layout.zero >= 1 else 1)
        out["gradients"] += trained * grads / (n if layout.shards_gradients else 1)
    if DTYPE_BYTES[compute] < 2 and layout.zero < 3:
        # the quantised weight and its transpose; a frozen base is kept quantised only, its transpose made when needed
        copies = DTYPE_BYTES[compute] * (1 if train.lora else 2)
        alone = train.lora is not None or precision.params == "fp8"
        out["parameters"] += params.low * (copies - (weight if alone else 0.0))
    return out


def updated_bytes(plan: Plan, train: Train) -> float:
    """Bytes an update moves for each parameter: one pass over gradients for their norm, one fused pass that reads
    gradient, master and moments and writes master, moments and the working parameter."""
    precision = plan.precision
    compute = precision.compute or train.dtype
    master = 4.0 if compute == "fp32" else STORED_BYTES[precision.master] or 2.0
    moments = OPTIMIZER_MOMENTS[train.optimizer] * STORED_BYTES[precision.moments]
    grads = STORED_BYTES[precision.grads]
    return grads + grads + 2 * (master + moments) + (0.0 if compute == "fp32" else 2.0)


def gathered_bytes(plan: Plan, params: Params, train: Train) -> float:
    """Working copy of a stage's parameters while ZeRO-3 has it gathered."""
    weight = 4.0 if (plan.precision.compute or train.dtype) == "fp32" else 2.0
    return (params.dense + params.expert) * weight if plan.layout.zero == 3 else 0.0


def unscattered_bytes(plan: Plan, params: Params) -> float:
    """Gradients of some layers as the backward leaves them, until they are scattered; 0 where they stay whole."""
    layout, kept = plan.layout, STORED_BYTES[plan.precision.grads]
    if not layout.shards_gradients:
        return 0.0
    experts = params.trained_expert if min(layout.shard or plan.edp, plan.edp) > 1 else 0.0
    return (params.trained_dense + experts) * kept


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes one microbatch leaves in a layer from F to its backward: ``saved`` in all, ``held`` of them (with the
    output gradients) from B to W, ``working`` while one pass runs through the layer. ``logits``: of those saved, what
    the loss keeps of the scores over the vocabulary."""

    saved: float = 0.0
    held: float = 0.0
    working: float = 0.0
    logits: float = 0.0

    def then(self, other: Activations) -> Activations:
        """Two layers one after the other: what is kept adds up, the working set is the larger one."""
        return Activations(
            saved=self.saved + other.saved,
            held=self.held + other.held,
            working=max(self.working, other.working),
            logits=self.logits + other.logits,
        )


def activations(c: Context, pieces: list[Piece], recompute: str) -> Activations:
    """What a list of pieces keeps under a recompute mode."""
    everything = sum(p.saved + p.core_saved for p in pieces)
    held = sum(p.held + p.gradient for p in pieces)
    passing = 2 * c.tokens * c.hidden * c.element  # a gradient in and out of the layer
    if recompute == "full":
        # only the layer's input stays; its activations come back while it is recomputed
        entry = c.shard_tokens * c.hidden * c.element
        return Activations(saved=entry, held=held, working=everything + passing)
    if recompute == "operators":
        entry = c.shard_tokens * c.hidden * c.element + kept_bytes(pieces)
        return Activations(saved=entry, held=held, working=everything + passing)
    kept = everything - (sum(p.core_saved for p in pieces) if recompute == "selective" else 0.0)
    again = sum(p.core_saved for p in pieces) if recompute == "selective" else 0.0
    widest = max(((p.saved if p.working is None else p.working) + p.gradient for p in pieces), default=0.0)
    logits = sum(p.logits for p in pieces)
    return Activations(saved=kept, held=min(held, kept + held), working=widest + passing + again, logits=logits)
