"""Executability of adapters over a frozen base (``phase=lora``): what of a legal plan the executor does not do with
them, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import Diagnostic
from meshwright.plan.record import Plan
from meshwright.spec import naming
from meshwright.spec.layers import Moe
from meshwright.spec.lora import EXPERT_TARGETS, FROZEN_BLOCKS
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import NO_CODEC, USUAL

#: Targets in the MLP of a block.
OF_MLP = ("gate", "up", "down")


def unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield everything that keeps adapters of a workload from being trained under a plan."""
    why = _of_model(model, train)
    if why:
        help = "matrices of attention and of dense MLPs have adapters in llama, qwen, gemma, phi, gpt2 and deepseek"
        yield _bad("P031", f"adapters of {model.name} are predicted, not trained: {why}", f"phase={train.phase}", help)
        return
    if plan.overlap.tp:
        message = "adapters with overlap=tp are priced and not run: their input is made whole before the products"
        yield _bad("P033", message, "overlap.tp", "leave tp out of overlap=")
    policy = read(plan.sync.policy)
    # parameters are averaged: a base that all replicas hold alike stays as it is
    if plan.sync.policy != USUAL and not (policy.rule.name == "local" and policy.codec == NO_CODEC):
        message = f"adapters under sync={plan.sync.policy} are priced and not run"
        yield _bad("P033", message, f"sync.policy = {plan.sync.policy}", "say sync=local:h=8, or drop sync=")
    yield from _of_experts(plan, model, train)
    for name in ("portions", "loss_portions"):
        if getattr(plan.memory, name) > 1:
            message = "adapters in portions of the sequence are priced and not run"
            yield _bad("P033", message, f"memory.{name} = {getattr(plan.memory, name)}", "drop the portions")
    yield from _split(plan, model)


def _of_model(model: Model, train: Train) -> str:
    """Return why a model's matrices get no adapters in the executor, "" where they do."""
    if not naming.school(model) or not model.is_decoder or not model.blocks:
        return "its layers have modules of their own"
    names = naming.names(model)
    if names.mixer or any(block.attention is None for block in model.blocks):
        return "it mixes tokens by more than attention"
    wanted, called = set(train.lora.targets), naming.modules(model)
    for name in dict.fromkeys(called.values()):
        one = [target for target, module in called.items() if module == name]
        if wanted & set(one) and not wanted >= set(one):
            return f"{' and '.join(one)} are {name}, which has one adapter or none (targets={'+'.join(one)})"
    if "v" in wanted and "v" not in called:
        return f"keys and values are made of one latent, {called['k']}, which is k's (targets=q+k+o+q_up+kv_up)"
    if lacking := [target for target in ("q_up", "kv_up") if target in wanted and target not in called]:
        whose = "queries" if lacking == ["q_up"] else "keys and values"
        return f"{' and '.join(lacking)}: its {whose} are made of no latent"
    gated = all(block.mlp.gated for block in model.blocks)
    if "gate" in train.lora.targets and not gated:
        return "its MLPs have no gate"
    if model.mixtures and any(target in OF_MLP for target in train.lora.targets):
        return "its MLPs are mixtures of experts (targets=q+k+v+o+experts_up+experts_down are trained)"
    return ""


def _of_experts(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield what keeps adapters of experts' own matrices from being trained."""
    said = [target for target in train.lora.targets if target in EXPERT_TARGETS]
    if not said:
        return
    if not model.mixtures or not all(mixture.gated for mixture in model.mixtures):
        why = "it has no experts" if not model.mixtures else "its experts have no gate"
        message = f"adapters of {model.name} on {'+'.join(said)} are not trained: {why}"
        yield _bad("P031", message, f"phase={train.phase}", "leave them out of targets=")
        return
    if train.lora.dropout:
        message = "experts' adapters have no dropout: PEFT adds them to the matrices, and not to what these give"
        yield _bad("P031", message, f"lora_dropout={train.lora.dropout:g}", "drop lora_dropout=, or experts' targets")
    layout, experts = plan.layout, plan.experts
    for name, value in (("layout.tp", layout.tp), ("experts.hot", experts.hot), ("experts.portions", experts.portions)):
        least = 0 if name.endswith("hot") else 1
        if value > least:
            message = f"experts' adapters with {name.split('.')[1]}={value} are priced and not run"
            yield _bad("P033", message, f"{name} = {value}", f"{name.split('.')[1]}={least}; ep, dp and pp are run")


def _split(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield each width of a quantised base that does not divide into blocks, of which each has a scale."""
    stored, tp = plan.precision.params, plan.layout.tp
    names = naming.names(model)
    if names.qkv and any(tp > a.kv_heads for block in model.blocks for a in block.attentions):
        message = f"the adapter of {names.qkv} with key-value heads that ranks share is priced and not run"
        most = min(a.kv_heads for block in model.blocks for a in block.attentions)
        yield _bad("P033", message, f"layout.tp = {tp}", f"tp of at most the {most} key-value heads")
    if stored not in FROZEN_BLOCKS:
        return
    place = f"precision.params = {stored}"
    latent = any(a.kv_lora_rank for block in model.blocks for a in block.attentions)
    if names.conv or latent:
        why = "of latent attention" if latent else "that are published transposed"
        yield _bad("P033", f"matrices {why} stored as {stored} are priced and not run", place, "drop params=")
        return
    if model.mixtures:
        message = f"a mixture's experts stored as {stored} are priced and not run"
        yield _bad("P033", message, place, "drop params=")
        return
    widths = {("hidden", model.hidden, 1)}
    widths |= {("heads", block.attention.heads * block.attention.head_dim, tp) for block in model.blocks}
    widths |= {("ffn", block.mlp.ffn, tp) for block in model.blocks if not isinstance(block.mlp, Moe)}
    block = FROZEN_BLOCKS[stored]
    for name, width, ways in sorted(widths):
        if block and width % (block * ways):
            among = f" on each of {ways} ranks" if ways > 1 else ""
            message = f"{stored} has a scale for {block} weights of a row, and {name}={width}{among} does not divide"
            fits = [str(n) for n in (1, 2, 4, 8, 16, 32) if n < ways and not width % (block * n)]
            help = f"tp of {', '.join(fits)} does, or params=int8" if fits else "params=int8 has one for all of a row"
            yield _bad("P033", message, f"layout.tp = {tp}, {place}", help)


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)
