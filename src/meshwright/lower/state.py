"""State: the bytes on every rank by kind, from the layout of parameters, gradients, optimizer and activations.

ZeRO's stages (Rajbhandari et al. 1910.02054) shard, from the outside in, the optimizer, the gradients, the
parameters. Activation bytes come from the same pieces that give the time (``layers/pieces.py``); for a GPT block
they add up to Korthikanti et al. (2205.05198): sbh(34 + 5as/h) without recompute.
"""

from __future__ import annotations

from math import ceil

import msgspec

from meshwright import layers
from meshwright.layers.kind import Params
from meshwright.layers.pieces import Context, Piece
from meshwright.lower.operators import kept_bytes
from meshwright.plan import Plan
from meshwright.spec import naming
from meshwright.spec.lora import EXPERT_TARGETS
from meshwright.spec.workload import DTYPE_BYTES, FROZEN_BYTES, LAYERWISE, OPTIMIZER_MOMENTS, STORED_BYTES, Lora, Train
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import DENSE, EVERY, EXPERT, GATHERED, MOMENTS, REFERENCE, Weights, stored
from meshwright.sync.moved import kept_values
from meshwright.sync.policy import read
from meshwright.sync.record import NO_CODEC, USUAL
from meshwright.work import Gemm, GroupedGemm


def params_of(c: Context, layer: msgspec.Struct) -> Params:
    """Parameters of a layer on one rank. A LoRA run trains the adapters of its blocks alone."""
    held = layers.of(layer).params(layer, c)
    dense = held.split / c.tp + held.whole + held.extra
    expert = held.expert / (c.plan.experts.ep * c.plan.etp)
    low = dense - held.whole + expert if held.low else 0.0
    if c.train.lora is None:
        return Params(
            dense=dense,
            expert=expert,
            trained_dense=dense,
            trained_expert=expert,
            low=low,
            whole=held.whole + held.common,
            repeated=held.repeated,
        )
    whole = c.tp == 1 and not any(naming.fused(c.model))
    adapters = lora_params(layer, c.hidden, c.train.lora) if whole else _adapters_of(c, layer, Gemm)
    experts = _adapters_of(c, layer, GroupedGemm) if set(EXPERT_TARGETS) & set(c.train.lora.targets) else 0.0
    return Params(
        dense=dense + adapters, expert=expert + experts, trained_dense=adapters, trained_expert=experts, low=low
    )


def _adapters_of(c: Context, layer: msgspec.Struct, kind: type[Gemm] | type[GroupedGemm]) -> float:
    """Adapter parameters of a layer on one of several tensor-parallel ranks, those of experts in products of their own
    `kind`: of each adapter the factor next to the split side of its matrix is split, and the other is whole on every
    rank. Nothing else of a frozen base has weight gradients."""
    gradients = [work for piece in layers.of(layer).pieces(c, layer) if isinstance(work := piece.weight, kind)]
    if kind is Gemm:
        return float(sum(work.m * work.n for work in gradients))
    return float(sum(work.groups * work.n * work.k for work in gradients))


def lora_params(layer: msgspec.Struct, hidden: int, lora: Lora) -> float:
    """Adapter parameters of one layer: rank * (inputs + outputs) of every target matrix it has."""
    adapted = layers.of(layer).adapters
    return float(lora.rank * sum(adapted(layer, hidden, target) for target in lora.targets))


def static_bytes(
    plan: Plan, train: Train, params: Params, encoded: Params | None = None, held: float | None = None
) -> dict[str, float]:
    """Bytes of a rank's constant state by category; `encoded` are the parameters whose gradients travel in a code,
    where not all of them do, `held` is the part of the sharded state that the rank has, where parts are uneven."""
    layout, precision = plan.layout, plan.precision
    compute = precision.compute or train.dtype
    whole = 1 / layout.shard_group if held is None else held
    part = {"dense": whole, "expert": 1 / min(layout.shard or plan.edp, plan.edp)}
    weight = 4.0 if compute == "fp32" else 2.0
    master = 0.0 if compute == "fp32" else STORED_BYTES[precision.master]
    moments = train.moments * STORED_BYTES[precision.moments]
    grads = STORED_BYTES[precision.grads]
    out = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for kind, trained in (("dense", params.trained_dense), ("expert", params.trained_expert)):
        held, mine = getattr(params, kind), part[kind]
        if layout.scopes:
            # weights as they are computed with over their own scope, masters where they are updated; sums that come
            # of scattering a step's on are beside these
            out["parameters"] += held * weight / layout.weights_over
            out["optimizer"] += trained * (master + moments) * mine
            folded = mine if layout.shard_group > layout.gradients_over else 0.0
            out["gradients"] += trained * grads * (1 / layout.gradients_over + folded)
            continue
        if layout.zero == 3:
            # the sharded copy is the master; the computing copy is gathered when needed
            kept = master if master else weight
            out["parameters"] += (trained * kept + (held - trained) * weight) * mine
            out["optimizer"] += trained * moments * mine
        else:
            out["parameters"] += held * weight
            out["optimizer"] += trained * (master + moments) * (mine if layout.zero >= 1 else 1)
        out["gradients"] += trained * grads * (mine if layout.shards_gradients else 1)
    if precision.params in FROZEN_BYTES:
        out["parameters"] -= params.low * _saved(plan, weight) * (whole if layout.zero == 3 else 1)
    if read(plan.sync.policy).rule.forwards:  # masters, and a copy of what is moved aside
        out["optimizer"] += (params.dense + params.expert) * (master + (master or weight))
    elif plan.sync.policy != USUAL:
        out["parameters"] += _remembered_bytes(plan, train, params if encoded is None else encoded)
    if DTYPE_BYTES[compute] < 2 and layout.zero < 3:
        # the quantised weight and its transpose; a frozen base is kept quantised only, its transpose made when needed
        copies = DTYPE_BYTES[compute] * (1 if train.lora else 2)
        alone = train.lora is not None or precision.params == "fp8"
        out["parameters"] += params.low * (copies - (weight if alone else 0.0))
    return out


def _saved(plan: Plan, weight: float) -> float:
    """Bytes that a parameter of a frozen base saves because it is stored quantised."""
    return weight - FROZEN_BYTES.get(plan.precision.params, weight)


def updated_bytes(plan: Plan, train: Train) -> float:
    """Bytes an update moves for each parameter: one pass over gradients for their norm, one fused pass that reads
    gradient, master and moments and writes master, moments and the working parameter."""
    precision = plan.precision
    compute = precision.compute or train.dtype
    master = 4.0 if compute == "fp32" else STORED_BYTES[precision.master] or 2.0
    policy = read(plan.sync.policy)
    # all clusters' momenta are read, and one is written
    moments = (OPTIMIZER_MOMENTS[train.optimizer] + train.moments) / 2 * STORED_BYTES[precision.moments]
    grads = STORED_BYTES[precision.grads]
    if policy.rule.optimizer:  # its moments are where its updates are encoded
        moments = 0.0
    more = 4 * master + grads if policy.reference else 0.0  # two points read, two others written
    if policy.scaling is not None:  # scales are read
        more = master
    if policy.priced:  # duals added to gradients, and parameters pulled to the middle between neighbours
        more = 2 * grads + master + 3 * master
    if policy.clocks is not None:  # six values mixed twice, and three of them moved by the gradient
        more = 24 * master + 3 * master
    if policy.pruning is not None:  # values aside, masked, and put back
        more = 5 * master
    if train.grow or train.align:  # squares of a rank's own gradients
        grads *= 1.5
    return more + grads + grads + 2 * (master + moments) + (0.0 if compute == "fp32" else 2.0)


def measured_bytes(plan: Plan, train: Train) -> float:
    """Bytes that taking the norms of matrices and of their updates moves for each parameter besides: gradients (once
    more), master and moments are read, and where the moments give the update they are read again."""
    if train.optimizer not in LAYERWISE:
        return 0.0
    precision = plan.precision
    master = 4.0 if (precision.compute or train.dtype) == "fp32" else STORED_BYTES[precision.master] or 2.0
    again = OPTIMIZER_MOMENTS[train.optimizer] * STORED_BYTES[precision.moments] if train.optimizer == "lamb" else 0.0
    return STORED_BYTES[precision.grads] * (train.optimizer == "lars") + master + again


def _remembered_bytes(plan: Plan, train: Train, params: Params) -> float:
    """Return the bytes that a rank keeps because changes are exchanged: parameters as they were at the last exchange,
    the outer momentum, what is on its way, a shard's own copy where what is gathered is less, and what codes
    remember."""
    policy, of, out = read(plan.sync.policy), stored(plan, train), 0.0
    for kind, trained in ((DENSE, params.trained_dense), (EXPERT, params.trained_expert)):
        for f in policy.rule.fragments(plan, policy, Weights(0, 0, kind, trained, trained), of):
            code = codec(f.codec)
            if f.due == EVERY:
                out += kept_values(f) * f.num_bytes / f.shard.size
            if f.served and policy.pruning is not None:  # all values, those that are kept, and the mask
                out += 2 * f.num_bytes + f.num_elements
            if f.served and policy.rule.passes:  # a direction or a trial step, a gradient, and where it goes from
                out += 3 * f.num_bytes
            if f.what == MOMENTS and policy.scaling is not None:  # no optimizer's: the scales of local steps
                copies = 4 if policy.scaling.apart else 1  # with values aside, gradients and what comes of them
                out += copies * f.num_bytes / f.shard.size
            if f.update == REFERENCE:  # a rank's gradient there, the sum, the point, and where a step goes from
                out += 2 * (f.element_bytes + of.masters) * f.num_elements / f.shard.size
            if f.what == GATHERED and f.within != NO_CODEC and plan.layout.zero < 3 and of.weights == of.masters:
                out += f.num_bytes / f.shard.size  # what is updated is no longer what is computed with
            out += code.state_values(ceil(f.num_elements / f.shard.size)) * f.element_bytes
    return out


def gathered_bytes(plan: Plan, params: Params, train: Train) -> float:
    """Return the bytes of a stage's computing copy of parameters while ZeRO-3 has it gathered."""
    weight = 4.0 if (plan.precision.compute or train.dtype) == "fp32" else 2.0
    held = (params.dense + params.expert) * weight - params.low * _saved(plan, weight)
    return held if plan.layout.zero == 3 else 0.0


def unscattered_bytes(plan: Plan, params: Params) -> float:
    """Return the bytes of some layers' gradients from the backward until they are scattered; 0 where they stay
    whole."""
    layout, kept = plan.layout, STORED_BYTES[plan.precision.grads]
    if not layout.shards_gradients:
        return 0.0
    experts = params.trained_expert if min(layout.shard or plan.edp, plan.edp) > 1 else 0.0
    return (params.trained_dense + experts) * kept


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """The activation bytes of one microbatch in a layer: ``saved`` for the backward, from F on; ``held`` for W, from B
    on (a part of these, and the output gradients); and ``working``, the workspace while one pass runs through the
    layer. ``logits``: the part of ``saved`` that are scores over the vocabulary, saved by the loss."""

    saved: float = 0.0
    held: float = 0.0
    working: float = 0.0
    logits: float = 0.0

    def then(self, other: Activations) -> Activations:
        """Return the bytes of two layers in a row: saved bytes add up, the workspace is the larger one."""
        return Activations(
            saved=self.saved + other.saved,
            held=self.held + other.held,
            working=max(self.working, other.working),
            logits=self.logits + other.logits,
        )


def activations(c: Context, pieces: list[Piece], recompute: str, entered: tuple[Context, ...] = ()) -> Activations:
    """Return the activation bytes of a list of pieces under a recompute mode; `entered` are the ranks at work on the
    streams that come in, where these are others than the layer's own."""
    everything = sum(p.saved + p.core_saved for p in pieces)
    held = sum(p.held + p.gradient for p in pieces)
    passing = 2 * c.tokens * c.hidden * c.element  # a gradient in and out of the layer
    came_in = sum(one.shard_tokens * one.hidden * one.element for one in entered or (c,))
    if recompute == "full":
        # only the layer's input stays; its activations come back while it is recomputed
        entry = came_in + sum(p.brought for p in pieces)
        return Activations(saved=entry, held=held, working=everything + passing)
    if recompute == "operators":
        entry = came_in + kept_bytes(pieces)
        return Activations(saved=entry, held=held, working=everything + passing)
    kept = everything - (sum(p.core_saved for p in pieces) if recompute == "selective" else 0.0)
    again = sum(p.core_saved for p in pieces) if recompute == "selective" else 0.0
    widest = max(((p.saved if p.working is None else p.working) + p.gradient for p in pieces), default=0.0)
    logits = sum(p.logits for p in pieces)
    return Activations(saved=kept, held=min(held, kept + held), working=widest + passing + again, logits=logits)
