"""Executability of a legal plan: one matrix of everything that the executor does not do, each with its reason.

A plan can be predicted as soon as it is legal (``plan/legality.py``). To train it, every word must be done, not
approximated: what the executor or torch underneath cannot do is refused here, with the nearest plan that can be run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan import adapters
from meshwright.plan.classifiers import unbuilt, unexecutable_classifier
from meshwright.plan.denoisers import unbuilt_denoiser, unexecutable_denoiser
from meshwright.plan.facets import facets
from meshwright.plan.facets.sequence import PIECED
from meshwright.plan.record import Plan
from meshwright.spec import naming
from meshwright.spec.ends import Head
from meshwright.spec.layers import Block, Moe
from meshwright.spec.model import Model
from meshwright.spec.numerics import ROPE_TYPES
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL

OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "lion", "lamb", "lars", "adagrad")
#: Schools whose layers have modules of their own, which every rank holds whole.
WHOLE = ("mamba2", "qwen3_5", "bert", "t5")
#: Those of them whose layers hand their states on from rank to rank.
HANDING = ("mamba2", "qwen3_5")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh", "relu")


def unexecutable(plan: Plan, model: Model, train: Train, *, precision: str = "") -> list[Diagnostic]:
    """Everything that keeps a legal plan from being trained for real; empty when it can be. `precision` is what the
    run computes in instead of the plan's word."""
    if plan.several:
        return _pools(plan, model, train, precision)
    if precision:
        stored = msgspec.structs.replace(plan.precision, compute=precision)
        plan = msgspec.structs.replace(plan, precision=stored)
    asked = (facet.unexecutable(plan, model, train) for facet in facets().values() if facet.unexecutable)
    return [
        *of_model(model),
        *_workload(train),
        *_measured(plan, train),
        *_moved_biases(plan, train),
        *_whole(plan, model, train),
        *_inside(plan, model),
        *(unexecutable_classifier(plan, model, train) if naming.classifies(model) else ()),
        *(unexecutable_denoiser(plan, model, train) if naming.denoises(model) else ()),
        *(adapters.unexecutable(plan, model, train) if train.lora is not None else ()),
        *chain.from_iterable(asked),
    ]


def _pools(plan: Plan, model: Model, train: Train, precision: str) -> list[Diagnostic]:
    """Return everything that keeps a plan of several pools from being trained: the reasons of each pool's own plan, and
    links that cannot be run."""
    found: list[Diagnostic] = []
    compute = {pool.plan.precision.compute or train.dtype for pool in plan.pools}
    if len(compute) > 1 and not precision:
        what = " and ".join(sorted(compute))
        found.append(_bad("P033", f"pools that compute in {what} are priced and not run", "pools", "say one of them"))
    if train.bias_rate:
        message = "balance=bias over several pools is priced and not run: choices are counted in one"
        found.append(_bad("P033", message, "pools", "one pool, or drop bias from balance="))
    if model.ways > 1:
        message = f"links that carry the several residual streams of {model.name} are priced and not run"
        found.append(_bad("P033", message, f"model {model.name}", "one pool, or the model without kraken"))
    if naming.denoises(model):
        message = f"links that carry what samples of {model.name} are told beside their tokens are priced and not run"
        found.append(_bad("P033", message, f"model {model.name}", "one pool"))
    if len(model.flows) > 1:
        message = f"links that carry the several streams of {model.name} are priced and not run"
        found.append(_bad("P033", message, f"model {model.name}", "one pool, or a model of one stream of tokens"))
    for pool in plan.pools:
        layout, where = pool.plan.layout, f"plan.{pool.name}"
        if layout.shares:
            message = f"uneven batch shares inside one of several pools are priced and not run ({pool.name})"
            found.append(_bad("P033", message, f"{where}.layout.shares = {layout.shares}", "drop shares"))
        if layout.cp > 1:
            message = f"links to context-parallel ranks are priced and not run ({pool.name})"
            found.append(_bad("P033", message, f"{where}.layout.cp = {layout.cp}", "take cp1 in every pool"))
        if pool.frozen and layout.zero >= 2:
            message = f"sharded parameters that are not trained are priced and not run ({pool.name})"
            found.append(
                _bad("P033", message, f"{where}.layout.zero = {layout.zero}", "leave zero out of a frozen pool")
            )
        for one in unexecutable(pool.plan, model, train, precision=precision):
            place = f"{where}.{one.place}" if one.code in ("P032", "P033") else one.place
            found.append(msgspec.structs.replace(one, place=place))
    return list(dict.fromkeys(found))


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def of_model(model: Model) -> Iterator[Diagnostic]:
    """Yield each reason that a model of its kind has no modules that are run."""
    known = ", ".join(sorted(naming.SCHOOLS))
    if not naming.school(model):
        help = f"families that are: {known}"
        yield _bad("P030", f"the {model.family} family is predicted, not trained", f"model {model.name}", help)
        return
    if naming.school(model) in WHOLE or naming.labelled(model):
        for why in sorted(set(_unbuilt(model))):
            message = f"{model.name} is predicted, not trained: {why}"
            yield _bad("P030", message, f"model {model.name}", f"trained: {known}")
        return
    if not _with_one_stream(model).is_decoder:
        why = "it is more than attention and MLP between one vocabulary's embedding and head"
        yield _bad("P030", f"{model.name} is predicted, not trained: {why}", f"model {model.name}", f"trained: {known}")
        return
    found = {why for block in model.blocks for why in _block(block, naming.school(model))}
    if naming.school(model) == "gpt2" and model.mixtures:
        found.add("no published GPT-2 has experts, so that theirs have no names")
    if len({b.norm for b in model.blocks}) > 1:
        found.add("it mixes kinds of norms")
    if model.embedding.norm_vectors or model.embedding.width:
        found.add("its embedding or head has more than one matrix")
    if model.numerics.rope_type not in ROPE_TYPES:
        found.add(f"its rotary scaling {model.numerics.rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    found |= set(model.numerics.refused) | {why for mixture in model.mixtures for why in _groups(model, mixture)}
    if len({b.attention.head_dim for b in model.blocks if b.attention.rotary}) > 1:
        found.add("its layers rotate heads of different widths")
    found |= set(_rotations(model))
    for why in sorted(found):
        yield _bad("P030", f"{model.name} is predicted, not trained: {why}", f"model {model.name}", f"trained: {known}")


def _unbuilt(model: Model) -> Iterator[str]:
    """The parts that a model has no modules of, by what it reads."""
    if naming.denoises(model):
        return unbuilt_denoiser(model, ACTIVATIONS)
    return unbuilt(model) if naming.classifies(model) else _parts(model)


def _with_one_stream(model: Model) -> Model:
    """Return a model whose blocks have a stream of their own for each part as if they had one."""
    if model.ways == 1:
        return model
    return msgspec.structs.replace(model, blocks=tuple(msgspec.structs.replace(b, ways=1) for b in model.blocks))


def _parts(model: Model) -> Iterator[str]:
    """Yield each part of the model that the modules of its naming scheme lack, for schemes whose layers every rank
    holds whole."""
    head = model.head
    if naming.school(model) == "bert" and not (isinstance(head, Head) and head.transform and head.tied):
        yield "it has no head that finds hidden tokens by the embedding's table"
    elif isinstance(head, Head) and head.pooler >= 0:
        yield "its head also tells the next sentence"
    if naming.school(model) == "bert" and model.flows[0].causal:
        yield "its tokens see no later one"
    for block in model.blocks:
        if isinstance(block.mlp, Moe):
            yield "it has experts"
        elif block.mlp is not None and block.mlp.activation not in ACTIVATIONS:
            yield f"its activation {block.mlp.activation!r} is not one of {', '.join(ACTIVATIONS)}"
        if block.attention is not None and block.attention.qkv_bias and naming.school(model) != "bert":
            yield "its attention has biases"


def _whole(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield each word of the plan that cannot be run with layers that every rank holds whole, as some naming schemes
    need."""
    if naming.school(model) not in WHOLE:
        return
    layout, family = plan.layout, model.family
    for axis in ("tp", "pp", "cp"):
        size = getattr(layout, axis)
        if axis == "cp" and plan.sequence.scans in PIECED and naming.school(model) in HANDING:
            continue  # each rank has its own tokens
        if size > 1:
            message = f"{axis}{size} of the {family} family is priced and not run: each rank holds its layers whole"
            yield _bad("P033", message, f"layout.{axis} = {size}", f"say {axis}1")
    if plan.memory.recompute == "selective":
        message = f"selective recompute of the {family} family is priced and not run"
        yield _bad("P033", message, "memory.recompute = selective", "say full, or drop it")
    if plan.overlap.tp and plan.overlap.how:
        message = f"overlap=tp:{plan.overlap.how} in the {family} family is priced and not run"
        yield _bad("P033", message, f"overlap.how = {plan.overlap.how}", "leave tp out of overlap=")
    if train.lengths is not None:
        message = f"documents of several lengths in the {family} family are priced and not run"
        yield _bad("P033", message, "lengths=", "drop lengths=")


def _inside(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield each word of the plan that cannot be run inside some blocks."""
    layout, attentions = plan.layout, model.attentions
    if layout.cp > plan.head_swap and any(a.kv_lora_rank for a in attentions):
        message = f"cp{layout.cp} of latent attention, whose latents travel round, is priced and not run"
        place, help = f"sequence.algorithm = {plan.sequence.algorithm}", f"say cp{layout.cp} ulysses, or cp1"
        yield _bad("P033", message, place, help)
    beside = any(getattr(block, "parallel", False) for block in model.blocks)
    if plan.memory.portions > 1 and beside:
        message = "layers in portions of blocks in parallel are priced and not run"
        yield _bad("P033", message, f"memory.portions = {plan.memory.portions}", "leave the portions out")
    if model.ways > 1:
        yield from _of_streams(plan)
    if not plan.overlap.tp or layout.tp == 1:
        return
    place, help = f"overlap.tp = {plan.overlap.tp}", "leave tp out of overlap="
    if beside:
        yield _bad("P033", "overlap=tp of blocks in parallel is priced and not run", place, help)
    if plan.overlap.how and any(a.normed_over_all for a in attentions):
        message = f"overlap=tp:{plan.overlap.how} beside norms over the heads of all ranks is priced and not run"
        yield _bad("P033", message, place, help)


def _of_streams(plan: Plan) -> Iterator[Diagnostic]:
    """Yield each word of the plan that cannot be run where each part of a block has a stream of its own."""
    layout, memory = plan.layout, plan.memory
    if layout.pp > 1:
        message = f"pp{layout.pp} of blocks with several streams, which all leave a stage, is priced and not run"
        yield _bad("P033", message, f"layout.pp = {layout.pp}", "say pp1")
    if memory.portions > 1:
        message = "layers in portions of blocks with several streams are priced and not run"
        yield _bad("P033", message, f"memory.portions = {memory.portions}", "leave the portions out")


def _rotations(model: Model) -> Iterator[str]:
    """Yield why positions cannot be rotated by the numbers that the model states."""
    n, rotated = model.numerics, [a for a in model.attentions if a.rotary]
    for a in rotated:
        width = a.rope_head_dim or int(a.head_dim * n.rope_fraction)
        if width % 2 or not 0 <= width <= a.head_dim:
            yield f"it rotates {width} of the {a.head_dim} numbers of a head, which are no pairs of them"
    if rotated and min(n.rope_theta, n.unscaled.rope_theta) <= 0:
        yield f"its rotary base rope_theta={min(n.rope_theta, n.unscaled.rope_theta):g} is not above 0"
    if rotated and n.rope_type != "default" and n.rope_factor <= 0:
        yield f"its rotary scaling's factor={n.rope_factor:g} is not above 0"
    if n.norm_eps < 0:
        yield f"its norms add {n.norm_eps:g}, below 0, to a variance"


def _groups(model: Model, mixture: Moe) -> Iterator[str]:
    """Yield why experts cannot be chosen in the groups that the model states."""
    groups, top = model.numerics.groups, model.numerics.top_groups
    if groups > 1 and mixture.experts % groups:
        yield f"{groups} groups (n_group) do not divide its {mixture.experts} experts"
    elif not 1 <= top <= groups or mixture.experts // groups * top < mixture.top_k:
        yield f"{top} of {groups} groups (topk_group, n_group) have no {mixture.top_k} of its {mixture.experts} experts"
    elif groups > 1 and model.numerics.sigmoid and mixture.experts // groups < 2:
        yield f"{groups} groups (n_group) of one expert each have no two best"


def _block(block: Block, school: str) -> Iterator[str]:
    a = block.attention
    if a.gated or a.position_params:
        yield "its attention has an output gate or learned distances"
    if (a.kv_lora_rank or a.q_lora_rank) and (school != "deepseek" or not a.kv_lora_rank):
        yield "its attention is latent, and its matrices have no names here"
    if a.index_heads or a.sinks or a.key_as_value or a.chunked:
        yield "its attention has an indexer, sinks, shared keys and values, or chunks"
    if a.qk_norm and not (a.qk_norm_params == 2 * a.head_dim or (a.normed_over_all and block.norm == "rmsnorm")):
        yield "queries and keys are normalised by more than one weight"
    if a.head_dim != a.v_head_dim and not a.kv_lora_rank:
        yield "its keys and values differ in width"
    if block.norms not in ((1, 2) if block.parallel else (2, 4)) or block.scale_params:
        yield "its blocks have norms or scales in other places than before or behind attention and MLP"
    if block.parallel and (isinstance(block.mlp, Moe) or a.kv_lora_rank):
        yield "experts or latents stand in a block whose attention and MLP read the same input"
    if block.mlp.activation not in ACTIVATIONS:
        yield f"its activation {block.mlp.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if isinstance(block.mlp, Moe) and (block.mlp.bias or (block.mlp.router_bias and school != "deepseek")):
        yield "its router or experts have biases"


def _measured(plan: Plan, train: Train) -> Iterator[Diagnostic]:
    """Yield each word of the plan under which replicas have no whole gradients of sequences of their own, whose spread
    a growing batch or aligned rates go by."""
    word = f"grow={train.grow:g}" if train.grow else f"align={train.align:g}" if train.align else ""
    if not word:
        return
    layout, found = plan.layout, []
    if layout.dp < 2:
        found.append((f"layout.dp = {layout.dp}", "one replica has no spread", "give the plan dp of 2 or more"))
    if layout.cp > 1:
        found.append((f"layout.cp = {layout.cp}", "ranks of cp share a sequence", "take cp1"))
    if layout.zero > 1:
        found.append((f"layout.zero = {layout.zero}", "sums are scattered as gradients come", "take zero1 or none"))
    if plan.experts.ep > 1:
        found.append((f"experts.ep = {plan.experts.ep}", "experts have gradients of all replicas' tokens", "drop ep"))
    if plan.sync.policy != USUAL:
        found.append((f"sync.policy = {plan.sync.policy}", "gradients are not summed as they are", "drop sync"))
    if layout.shares:
        found.append((f"layout.shares = {layout.shares}", "replicas' shares of the batch differ", "drop shares"))
    if train.grow and train.packing:
        found.append((f"pack={train.packing}", "packed rows are laid out for one batch", "take pack=concat or drop it"))
    for place, why, help in found:
        yield _bad("P033", f"{word} needs every replica's own gradient, and {why}", place, help)


def _moved_biases(plan: Plan, train: Train) -> Iterator[Diagnostic]:
    """Yield why selection biases cannot follow the loads of a global batch: replicas do not take each step together."""
    policy, layout = read(plan.sync.policy), plan.layout
    apart = policy.rule.together(plan) != layout.dp * layout.cp
    if train.bias_rate and (apart or policy.early or policy.rule.forwards or policy.rule.optimizer or policy.reference):
        said = plan.sync.policy
        message = f"balance=bias counts choices in steps that all replicas take alike, and those of sync={said} are not"
        yield _bad("P033", message, f"sync.policy = {said}", "drop sync, or bias from balance=")


def _workload(train: Train) -> Iterator[Diagnostic]:
    if train.optimizer not in OPTIMIZERS:
        help = f"say one of {', '.join(OPTIMIZERS)}"
        yield _bad("P031", f"{train.optimizer} is predicted, not trained", f"optimizer={train.optimizer}", help)
