"""Refusals of the serving engine: every word of a plan or of an engine that it does not do, with its reason.

What is predicted is served exactly as it is written or not at all. Words that say how a prediction counts (``accept``,
``engine``, ``graphs``, ``routing``) change nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright import serving
from meshwright.answer.drafting import HEAD, NGRAM
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.executable import WHOLE, of_model
from meshwright.plan.facets import fields
from meshwright.plan.pool import KV
from meshwright.spec import naming
from meshwright.spec.engine_words import KV_BYTES, EngineWords
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model
from meshwright.spec.serve_values import AUTO_BUDGET

#: Fields of a plan that lay out serving, and are served.
SERVED = ("tp", "pp", "dp", "sp", "ep", "etp", "dtype", "weights", "expert_weights", "order", "stages", "imbalance")
#: Formats of stored weights that are served (:mod:`meshwright.run.serve.stored`).
STORED = ("int8", "fp8", "int4")
#: Budgets that are served, and why others are not.
KEPT, SHADOWED = "h2o", "shadowkv"
OTHERS = {
    "scalekv": "layers keep alike",
    "instinfer": "drives compute no attention",
    "flexgen": "keys and values do not lie on drives",
}
#: Layouts that are not served: why, and what has so many ranks all the same.
APART = {
    "cp": (
        "an engine's ranks have other heads or other layers of a sequence, and all of its tokens",
        "say tp{0} or pp{0}, which divide a context's keys and values by heads or layers",
    ),
    "adp": ("a sequence's keys and values lie on all ranks of tp", "say dp{0}: engines that share the requests"),
}
#: Policies that take no guesses: their sequences compute one token each.
UNGUESSED = ("static", "orca", "flover")


def refused(plan: Plan, model: Model, words: EngineWords) -> list[Diagnostic]:
    """Return everything of a plan, a model and an engine's words that is not served."""
    pools = [pool.plan for pool in plan.pools]
    if words.peers is not None:
        found = [*_of_model(model), *_of_peers(plan, words), *_of_words(words)]
        return found + [bad for one in pools for bad in _of_plan(one_replica(one))]
    found = [*_of_model(model), *(bad for one in pools for bad in _of_plan(one)), *_of_words(words)]
    found += [bad for one in pools for bad in _of_budget(one, model, words)]
    if plan.several:
        found += _of_pools(plan, words)
    return found or [bad for one in pools for bad in _undivided(one, model)]


def _of_peers(plan: Plan, words: EngineWords) -> Iterator[Diagnostic]:
    """Yield what peers of one client are not served with."""
    place, count = f"--serve peers={words.peers.text()}", plan.layout.dp
    if plan.several or plan.layout.num_ranks > count:
        yield _bad("a peer that runs is one process", place, "say dp alone, such as dp4")
    if len(words.peers.layers) not in (0, 1, count):
        message = f"layers of {len(words.peers.layers)} peers, and there are {count}"
        yield _bad(message, place, "one number for all, or one for each: layers=16+8+8")
    if words.peers.lost:
        yield _bad("lost= says what a prediction loses", place, "drop lost=: a peer that dies is replaced")
    if words.prefix_cache or words.preempt == "swap" or words.kv_budget:
        message = "a client's copies lie where its sequences' keys and values do, each its own and on no host"
        yield _bad(message, place, "drop prefix_cache=, preempt=swap and kv_budget=")
    if words.draft not in ("", NGRAM):
        yield _bad(f"a draft model beside peers ({words.draft})", f"--serve draft={words.draft}", "say draft=ngram")


def one_replica(plan: Plan) -> Plan:
    """Return the plan of each of the ``dp`` engines that a plan of one pool says."""
    if plan.several or plan.layout.dp == 1:
        return plan
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=1))


def _of_model(model: Model) -> Iterator[Diagnostic]:
    if naming.school(model) in WHOLE or naming.labelled(model):
        message = f"the {model.family} family is trained and predicted, and not served"
        yield _bad(message, f"model {model.name}", "a decoder of attention and MLPs or experts")
        return
    if model.ways > 1:
        message = f"{model.name} is trained and predicted, and not served: its blocks have several streams"
        yield _bad(message, f"model {model.name}", "name the model without kraken")
    for one in of_model(model):
        yield _bad(one.message.replace("not trained", "not served"), one.place, one.help.replace("trained", "served"))


def _of_plan(plan: Plan) -> Iterator[Diagnostic]:
    if plan.layout.dp > 1:
        yield _bad(
            f"dp{plan.layout.dp}: an engine is one replica",
            f"plan.layout.dp = {plan.layout.dp}",
            "meshwright serve starts an engine a replica, of plans of one pool",
        )
    for said in sorted({plan.precision.weights, plan.precision.experts} - {"", *STORED}):
        help = f"weights of {', '.join(STORED)}"
        yield _bad(f"weights in {said} are predicted, and not served", f"plan weights={said}", help)
    for name, field in fields().items():
        value = field.value(plan)
        if name not in SERVED and value != field.usual:
            said = f"{name}={value}"
            why, help = APART.get(name, ("", f"drop {name}"))
            message = f"{said} is predicted, and no engine serves it" + (f": {why}" if why else "")
            yield _bad(message, f"plan {said}", help.format(value))


def _of_pools(plan: Plan, words: EngineWords) -> Iterator[Diagnostic]:
    """Yield what keeps the pools of a plan from being the two halves of an engine."""
    names = {pool.name for pool in plan.pools}
    if len(names) != 2 or len(plan.links) != 1 or {plan.links[0].source, plan.links[0].target} != names:
        message = f"{len(plan.pools)} pools with {len(plan.links)} links are predicted, and not served"
        help = "an engine has one pool, or two with a link: prefill=[tp2] + decode=[tp1] prefill->decode:kv"
        yield _bad(message, "plan", help)
    for link in plan.links:
        if link.what != KV:
            yield _bad(f"nothing that requests need flows over {link.text()}", "plan.links", f"write {link.text()}:kv")
    for pool in plan.pools:
        for word in (*((f"part={pool.part}",) if pool.part else ()), *(("frozen",) if pool.frozen else ())):
            message = f"{pool.name} says {word}, and each pool that serves holds the whole model"
            yield _bad(message, f"plan.{pool.name}.{word}", f"drop {word}")
    kinds = sorted({pool.plan.precision.compute for pool in plan.pools})
    if len(kinds) > 1:
        message = f"keys and values are sent as they are, and the pools compute in {' and '.join(map(repr, kinds))}"
        yield _bad(message, "plan.pools", "say the same type for both pools")
    if words.kv_budget:
        message = "a KV budget in pools is predicted, and not served: what tokens it keeps is not sent"
        yield _bad(message, f"--serve kv_budget={words.kv_budget}", "drop it, or say a plan of one pool")
    if words.kv_send != EngineWords().kv_send:
        message = f"kv_send={words.kv_send} is predicted, and not served: all layers are sent once a prompt is computed"
        yield _bad(message, f"--serve kv_send={words.kv_send}", "drop kv_send=")


def _undivided(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield each size of a plan that does not divide what it splits."""
    tp, pp, ep = plan.layout.tp, plan.layout.pp, plan.experts.ep
    for spec in model.attentions:
        alike = spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0
        if spec.heads % tp or not alike:
            message = f"tp{tp} does not divide {spec.heads} heads and {spec.kv_heads} key-value heads"
            yield _bad(message, f"plan.layout.tp = {tp}", "a tp that divides both")
    for block in model.blocks:
        width = block.mlp.ffn
        if width % (tp // ep if isinstance(block.mlp, Moe) and ep <= tp else tp):
            yield _bad(f"tp{tp} does not divide an MLP of {width}", f"plan.layout.tp = {tp}", "a tp that divides it")
    if pp > model.num_layers:
        message = f"pp{pp} stages of {model.num_layers} layers"
        yield _bad(message, f"plan.layout.pp = {pp}", f"pp{model.num_layers} at most")
    etp = plan.experts.etp or max(1, tp // ep)
    if (ep > 1 or plan.experts.etp > 1) and (not model.mixtures or ep * etp != tp):
        message = f"ep{ep} and etp{etp} split the experts over the {tp} ranks of tp{tp}"
        yield _bad(message, f"plan.experts.ep = {ep}", f"for a model with experts, an ep that divides {tp}")
    if any(mixture.experts % ep for mixture in model.mixtures):
        yield _bad(f"ep{ep} does not divide the experts", f"plan.experts.ep = {ep}", "an ep that divides them")


def _of_words(words: EngineWords) -> Iterator[Diagnostic]:
    for axis, name in (("batching", words.policy), ("order", words.order)):
        try:
            serving.get(axis, name)
        except MeshwrightError as error:
            yield from error.diagnostics
    usual = EngineWords()
    for name, why in (
        ("chunk_cache", "texts are not kept apart from what stands before them"),
        ("borrow", "replicas do not lend blocks"),
        ("pairs", "replicas do not hold copies"),
        ("beside", "a device is one engine's"),
        ("power", "clocks stay as they are"),
        ("zoo", "an engine computes whole models"),
        ("targets", "one copy of the model verifies"),
        ("draft_cache", "a draft model keeps what it has read"),
        ("adapter_pool", "adapters are read as they are published"),
    ):
        value = getattr(words, name)
        if value != getattr(usual, name):
            said = value.text() if hasattr(value, "text") else value
            yield _bad(f"{name}={said} is predicted, and not served: {why}", f"--serve {name}", f"drop {name}=")
    if KV_BYTES[words.kv] < 2:
        help = "drop kv=: keys and values are kept as they are computed"
        yield _bad(f"kv={words.kv} is predicted, and not served", f"--serve kv={words.kv}", help)
    if words.budget == AUTO_BUDGET:
        help = "say the number that `meshwright predict --serve` finds for budget=auto"
        yield _bad("budget=auto follows from a prediction", "--serve budget=auto", help)
    yield from _of_drafts(words)


def of_adapters(words: EngineWords) -> Iterator[Diagnostic]:
    """Yield each word that is not served where requests have LoRA adapters."""
    if words.peers is not None:
        message = "adapters are not sent to peers"
        yield _bad(message, f"--serve peers={words.peers.text()}", "drop --adapter, or peers=")
    if words.lora == "merged":
        message = "lora=merged is predicted, and not served: adapters are computed beside the weights"
        yield _bad(message, "--serve lora=merged", "say lora=unified, or lora=slots")
    if words.lora == "models":
        message = "lora=models is predicted, and not served: an engine holds one model"
        yield _bad(message, "--serve lora=models", "say lora=unified, or lora=slots")
    if words.policy == "static":
        help = "say policy=orca, or another that admits requests one by one"
        yield _bad("adapters in static batches are not served", "--serve policy=static", help)


def _of_budget(plan: Plan, model: Model, words: EngineWords) -> Iterator[Diagnostic]:
    """Yield what a KV budget is not served with."""
    name = words.kv_budget.partition(":")[0]
    if not name:
        return
    place, tp = f"--serve kv_budget={words.kv_budget}", plan.layout.tp
    if name not in serving.names("kv_budget"):
        try:
            serving.get("kv_budget", name)
        except MeshwrightError as error:
            yield from error.diagnostics
    elif name not in (KEPT, SHADOWED):
        why = OTHERS.get(name, "the engine drops tokens as h2o does alone")
        help = f"say kv_budget={KEPT}, or {SHADOWED}"
        yield _bad(f"kv_budget={name} is predicted, and not served: {why}", place, help)
    elif name == SHADOWED:
        yield from _of_shadows(model, words, place)
    if words.prefix_cache:
        help = "drop one of them: what a budget keeps of a prefix depends on what follows it"
        yield _bad("a KV budget and shared prefixes", f"{place},prefix_cache=yes", help)
    if words.draft:
        help = "drop one of them: what a wrong guess drove out would be lost"
        yield _bad("a KV budget and guesses", f"{place},draft={words.draft}", help)
    if any(tp > (spec.heads if spec.kv_lora_rank else spec.kv_heads) for spec in model.attentions):
        help = "a tp of at most the key-value heads: the queries of a head choose together what stays of it"
        yield _bad(f"a KV budget where tp{tp} repeats key-value heads", f"plan.layout.tp = {tp}", help)


def _of_shadows(model: Model, words: EngineWords, place: str) -> Iterator[Diagnostic]:
    """Yield what ShadowKV is not served with."""
    if any(spec.window or spec.kv_lora_rank for spec in model.attentions):
        message = f"{model.name} has sliding windows or latent attention, whose keys are few or of low rank already"
        yield _bad(message, place, f"say kv_budget={KEPT}, or none")
    if words.preempt == "swap":
        yield _bad("values lie on the host as they are, and preempt=swap", place, "drop preempt=swap")
    if words.policy == "static":
        yield _bad("places of static batches that are computed in vain", place, "say policy=orca, or another")


def _of_drafts(words: EngineWords) -> Iterator[Diagnostic]:
    if words.speculation != EngineWords().speculation:
        message = f"speculation={words.speculation} is predicted, and not served: guesses come before each iteration"
        yield _bad(message, f"--serve speculation={words.speculation}", "say speculation=speculative")
    if words.draft == HEAD:
        yield _bad("draft=mtp is predicted, and not served", "--serve draft=mtp", "say ngram, or a model's folder")
    if words.draft and words.policy in UNGUESSED:
        message = f"policy={words.policy} computes one token of every answer, and no guesses"
        yield _bad(message, f"--serve draft={words.draft}", "say policy=vllm-v1, vllm-v0 or sarathi")


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="W014", message=message, place=place, help=help)
