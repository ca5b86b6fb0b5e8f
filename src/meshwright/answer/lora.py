"""The LoRA adapters of a replica, or the models that take turns on it: the rules of their memory, and their costs."""

from __future__ import annotations

from math import ceil

from meshwright.cost import Costs
from meshwright.lower.forward import Forward
from meshwright.serving.adapters import AdapterRules
from meshwright.simulate.lora import LoraCosts, adapter_bytes, projections
from meshwright.spec.hardware import Device, Node
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: The way in which each adapter is a model of its own.
MODELS = "models"


def has_adapters(requests: Requests) -> bool:
    """Return whether any request needs an adapter."""
    return bool(len(requests.adapter)) and bool((requests.adapter >= 0).any())


def stored_bytes(serve: Serve, forward: Forward) -> float:
    """Return the bytes of one adapter on a rank, over all pipeline stages: of its rank, or of that of the pool that it
    is built from (MoS, Wang et al. 2024, 2410.00938); where it is a model, all of its weights."""
    if serve.engine.lora == MODELS:
        return sum(forward.weight_bytes(stage) for stage in range(forward.plan.layout.pp))
    return adapter_bytes(forward, serve.engine.adapter_pool or serve.adapter_rank)


def adapter_rules(serve: Serve, requests: Requests, forward: Forward, block_bytes: float) -> AdapterRules | None:
    """Return the rules of adapters in a cache of so large blocks; None where no request has one."""
    if not has_adapters(requests):
        return None
    words = serve.engine
    if words.lora == "unified":
        each = stored_bytes(serve, forward) / forward.plan.layout.pp
        return AdapterRules(blocks=ceil(each / block_bytes) if block_bytes else 0)
    whole = words.lora == MODELS
    slots = words.adapter_slots if words.lora in ("slots", MODELS) else 1
    return AdapterRules(slots=slots, merged=words.lora == "merged" or whole, alone=whole)


def reserved_bytes(serve: Serve, requests: Requests, forward: Forward) -> float:
    """Return the bytes of memory that slots of adapters take from the cache."""
    words = serve.engine
    if not has_adapters(requests) or words.lora not in ("slots", MODELS):
        return 0.0
    more = words.adapter_slots - (words.lora == MODELS)  # the model itself is one of them
    return more * stored_bytes(serve, forward)


def lora_part(
    serve: Serve, requests: Requests, forward: Forward, device: Device, node: Node, costs: Costs
) -> LoraCosts | None:
    """Return what adapters cost a replica; None where no request has one. A merged one is added to the weights of the
    projections, and taken out of them when the next one comes: both read and write them."""
    if not has_adapters(requests):
        return None
    way, tp = serve.engine.lora, forward.plan.layout.tp
    stages = forward.plan.layout.pp
    weights = sum(a * b * layers for a, b, layers in projections(forward)) * 2.0 / tp / stages
    return LoraCosts(
        forward=forward,
        device=device,
        costs=costs,
        rank=serve.adapter_rank,
        load_s=stored_bytes(serve, forward) / stages / ((node.copies_gb_s if way == MODELS else node.pcie_gb_s) * 1e9),
        whole=way == MODELS,
        prefetched=way == "unified",
        merge_s=4.0 * weights / (device.memory_gb_s * 1e9) if way == "merged" else 0.0,
    )
