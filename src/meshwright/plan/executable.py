"""What a legal plan may still not be: executable. One matrix of what the executor does not do, each with its reason.

A plan can be predicted as soon as it is legal (``plan/legality.py``). To train it, every word must be done, not
approximated: what the executor or torch underneath cannot do is refused here, with the nearest plan that can be run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan import Plan
from meshwright.spec import naming
from meshwright.spec.layers import Block, Moe
from meshwright.spec.model import Model
from meshwright.spec.numerics import ROPE_TYPES
from meshwright.spec.workload import Train

#: What a step may be computed in.
COMPUTE = ("fp32", "bf16", "float64")
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh", "relu")


def unexecutable(plan: Plan, model: Model, train: Train, *, precision: str = "") -> list[Diagnostic]:
    """Everything that keeps a legal plan from being trained for real; empty when it can be. `precision` is what the
    run computes in instead of the plan's word."""
    return [*_model(model), *_workload(train), *_precision(plan, train, precision), *_combinations(plan, model)]


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def _model(model: Model) -> Iterator[Diagnostic]:
    known = ", ".join(sorted(naming.SCHOOLS))
    if not naming.school(model):
        help = f"families that are: {known}"
        yield _bad("P030", f"the {model.family} family is predicted, not trained", f"model {model.name}", help)
        return
    if not model.is_decoder:
        why = "it is more than attention and MLP between one vocabulary's embedding and head"
        yield _bad("P030", f"{model.name} is predicted, not trained: {why}", f"model {model.name}", f"trained: {known}")
        return
    found = {why for block in model.blocks for why in _block(block)}
    if naming.school(model) == "gpt2" and model.mixtures:
        found.add("no published GPT-2 has experts, so that theirs have no names")
    if len({b.norm for b in model.blocks}) > 1:
        found.add("it mixes kinds of norms")
    if model.embedding.norm_vectors or model.embedding.width or model.head.bias:
        found.add("its embedding or head has more than one matrix")
    if model.numerics.rope_type not in ROPE_TYPES:
        found.add(f"its rotary scaling {model.numerics.rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    if len({b.attention.head_dim for b in model.blocks if b.attention.rotary}) > 1:
        found.add("its layers rotate heads of different widths")
    for why in sorted(found):
        yield _bad("P030", f"{model.name} is predicted, not trained: {why}", f"model {model.name}", f"trained: {known}")


def _block(block: Block) -> Iterator[str]:
    a = block.attention
    if a.gated or a.position_params:
        yield "its attention has an output gate or learned distances"
    if a.kv_lora_rank or a.q_lora_rank:
        yield "its attention is latent"
    if a.index_heads or a.sinks or a.key_as_value or a.chunked:
        yield "its attention has an indexer, sinks, shared keys and values, or chunks"
    if a.qk_norm and a.qk_norm_params != 2 * a.head_dim:
        yield "queries and keys are normalised over more than a head"
    if a.head_dim != a.v_head_dim:
        yield "its keys and values differ in width"
    if block.parallel or block.norms != 2 or block.scale_params:
        yield "attention and MLP are not one after the other with a norm before each"
    if block.mlp.activation not in ACTIVATIONS:
        yield f"its activation {block.mlp.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if isinstance(block.mlp, Moe) and (block.mlp.router_bias or block.mlp.bias):
        yield "its router or experts have biases"


def _workload(train: Train) -> Iterator[Diagnostic]:
    if train.lora is not None:
        yield _bad("P031", "adapters are predicted, not trained", f"phase={train.phase}", "drop phase=lora")
    if train.optimizer not in OPTIMIZERS:
        help = f"say one of {', '.join(OPTIMIZERS)}"
        yield _bad("P031", f"{train.optimizer} is predicted, not trained", f"optimizer={train.optimizer}", help)


def _precision(plan: Plan, train: Train, override: str) -> Iterator[Diagnostic]:
    p = plan.precision
    compute = override or p.compute or train.dtype
    if compute not in COMPUTE:
        why = "needs loss scaling" if compute == "fp16" else "needs kernels torch has on few devices"
        nearest = _with(plan, "precision", compute="bf16")
        yield _bad("P032", f"{compute} is predicted, not trained: it {why}", f"precision.compute = {compute}", nearest)
    for name, known in (("params", ("bf16",)), ("grads", ("fp32", "bf16")), ("master", ("fp32", "none"))):
        value = getattr(p, name)
        if value not in known:
            nearest = _with(plan, "precision", **{name: known[0]})
            yield _bad("P032", f"{name}={value} is predicted, not trained", f"precision.{name} = {value}", nearest)
    if p.moments != "fp32":
        nearest = _with(plan, "precision", moments="fp32")
        message = f"moments={p.moments} is predicted, not trained"
        yield _bad("P032", message, f"precision.moments = {p.moments}", nearest)


def _combinations(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Pairs of facets that exclude each other in torch or in the executor."""
    layout = plan.layout
    if plan.memory.attention == "unfused":
        nearest = _with(plan, "memory", attention="flash")
        yield _bad("P033", "unfused attention is priced and not run", "memory.attention = unfused", nearest)
    if plan.memory.recompute == "operators":
        nearest = _with(plan, "memory", recompute="full")
        yield _bad("P033", "recompute by operators is priced and not run", "memory.recompute = operators", nearest)
    if plan.memory.loss != "eager":
        nearest = _with(plan, "memory", loss="eager")
        yield _bad(
            "P033",
            f"the loss kernels {plan.memory.loss!r} are priced and not run",
            f"memory.loss = {plan.memory.loss}",
            nearest,
        )
    if plan.overlap.ep:
        nearest = _with(plan, "overlap", ep=False)
        yield _bad("P033", "expert exchange beside compute is priced and not run", "overlap.ep", nearest)
    if layout.shares:
        nearest = _with(plan, "layout", shares=())
        yield _bad("P033", "uneven batch shares are priced and not run", f"layout.shares = {layout.shares}", nearest)
    if plan.overlap.tp and layout.tp > 1:
        nearest = _with(plan, "overlap", tp=False)
        yield _bad("P033", "products sliced beside their collective are priced and not run", "overlap.tp", nearest)
    moe = bool(model.mixtures)
    if layout.zero == 3 and moe and layout.pp == 1:
        # fully_shard knows one mesh a module; experts are replicated over another one than the router beside them
        nearest = _with(plan, "layout", zero=2)
        yield _bad("P033", "fully sharded experts are priced and not run", "layout.zero = 3", nearest)


def _with(plan: Plan, facet: str, **changed: Any) -> str:
    """The nearest plan that can be run, in words."""
    record = msgspec.structs.replace(getattr(plan, facet), **changed)
    return f"the nearest plan that runs: {msgspec.structs.replace(plan, **{facet: record}).text()!r}"
