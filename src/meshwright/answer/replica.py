"""The replicas of a serving plan: what their ranks hold, their cache blocks, the costs of their iterations, and which
requests each of them serves."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.drafting import DraftPart, draft_part
from meshwright.answer.lora import adapter_rules, lora_part, reserved_bytes
from meshwright.answer.prediction import RankMemory
from meshwright.answer.token_budget import MOST_BUDGET, budget_within
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.cost.fitted import products_library
from meshwright.lower.entry import Entry
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.batching import BatchPolicy
from meshwright.serving.cache import CacheRules
from meshwright.serving.decided import budget_shares, limits_of, rules_of
from meshwright.serving.kv_budget import KvShares
from meshwright.simulate import published
from meshwright.simulate.iterations import MOST_TOKENS, IterationCosts, priced, slowed
from meshwright.simulate.serve import simulate, simulate_routed
from meshwright.simulate.served import HostTimes, Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device, Node
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests, common_prefix
from meshwright.spec.serve import Serve
from meshwright.spec.serve_values import AUTO_BUDGET


class BuiltReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a plan: what its ranks hold (``memory``), its cache ``blocks``, and the ``replica`` of the
    simulator, None where not even the shortest request fits beside the weights."""

    memory: tuple[RankMemory, ...]
    blocks: int
    replica: Replica | None

    @property
    def fits(self) -> bool:
        """Whether there is room for a request, and no rank holds more than its device has."""
        return self.replica is not None and all(rank.headroom_bytes >= 0 for rank in self.memory)


def alone(plan: Plan) -> Plan:
    """Return the plan of one replica: its ranks lie next to one another, as an engine of its own has them."""
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=1))


def built(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    requests: Requests,
    costs: Costs,
    profile: EngineProfile,
    tables: dict[Hashable, IterationCosts] | None = None,
    split: bool = True,
    taken: float = 0.0,
) -> BuiltReplica:
    """Return the replica of a legal plan for requests. `tables` keeps prices that replicas alike share: those of the
    same model, cluster, costs and profile. Without `split` prices are not told by causes. So many bytes of every device
    are `taken` by others."""
    policy = serving.get("batching", serve.engine.policy)
    kept = kv_shares(serve, model)
    device, one = cluster.islands[0].device, alone(plan)
    forward = Forward(model, one, Mesh(one, cluster), serve.engine.kv, common_prefix(requests), serve.expert_routing)
    length = requests.prompt + requests.output
    tokens, batch = _largest(serve, policy, requests, plan), min(serve.engine.max_batch, len(requests))
    token_s = 2.0 * forward.kv_bytes(0) / (device.memory_gb_s * 1e9)  # read and written
    largest = {"tokens": min(tokens, MOST_TOKENS), "batch": batch, "context": int(length.max())}
    reserved = reserved_bytes(serve, requests, forward)
    drafting = draft_part(serve.engine, model, one, cluster, costs, largest, token_s)
    memory, blocks = kv_memory(
        forward, device, profile, serve, length, min(tokens, 1 << 20), batch, drafting, reserved, taken
    )
    memory = tuple(msgspec.structs.replace(rank, multiplicity=rank.multiplicity * plan.layout.dp) for rank in memory)
    lenders = plan.layout.dp if serve.engine.borrow else 1
    if not serve.engine.kv_blocks and lenders * blocks * serve.engine.block < int(length.min()):
        return BuiltReplica(memory=memory, blocks=0, replica=None)
    budget, groups = _budget(serve, policy, plan), plan.layout.adp
    limits = limits_of(serve.engine, blocks, budget=budget, groups=groups, device_share=kept.device)
    most = {
        "tokens": min(tokens, lenders * blocks * limits.block + batch),
        "batch": batch,
        "context": int(length.max()),
    }
    key = (one, serve.engine.kv, forward.shared, split, *most.values())
    table = None if tables is None else tables.get(key)
    if table is None and profile.iterations:
        times = profile.published(model.name, device.name, one.layout.tp)
        if times is not None:
            table = published.table(times, **most)
    if table is None:
        table = priced(forward, device, costs, **most, split=split)
        if not one.serving.divides:  # the host and its link are no faster in an engine
            table = paced(table, profile, device)
        if tables is not None:
            tables[key] = table
    node = cluster.islands[0].node
    block_bytes = max(_block_bytes(forward, stage, serve, length) for stage in range(plan.layout.pp))
    lora = lora_part(serve, requests, forward, device, node, costs)
    replica = Replica(
        policy=policy,
        limits=limits,
        costs=table,
        host=streaming(issued(host_times(profile, model, serve, plan.layout.pp), forward), forward, cluster),
        stages=plan.layout.pp,
        order=serving.get("order", serve.engine.order),
        rules=cache_rules(serve, requests, block_bytes, adapter_rules(serve, requests, forward, block_bytes)),
        wanted_s=wanted_s(serve),
        block_s=block_bytes / (node.pcie_gb_s * 1e9),
        kv_read=kept.read,
        fetch_s=fetched_s(kept, node, block_bytes / limits.block),
        in_drive=kept.in_drive,
        fetch_chosen=kept.chosen,
        drafts=drafting.drafts if drafting else None,
        guessing=drafting.guesses if drafting else None,
        lora=lora,
    )
    if serve.engine.budget == AUTO_BUDGET and serve.tpot is not None:
        found = msgspec.structs.replace(serve.engine, budget=budget_within(replica, requests, serve.tpot.seconds))
        serve = msgspec.structs.replace(serve, engine=found)  # a smaller budget leaves more of the memory
        return built(model, cluster, serve, plan, requests, costs, profile, tables, split, taken)
    return BuiltReplica(memory=memory, blocks=blocks, replica=replica)


def paced(table: IterationCosts, profile: EngineProfile, device: Device) -> IterationCosts:
    """Return the costs of kernels on a device at the pace that they have in an engine."""
    if profile.kernels != 1.0:
        table = slowed(table, profile.kernels)
    prompts = profile.prompts
    if profile.prompts_over:
        prompts *= profile.prompts_over.get(products_library(device), 1.0)
    return table if prompts == 1.0 else table.beyond(profile.graph_tokens, prompts)


def kv_shares(serve: Serve, model: Model) -> KvShares:
    """Return what the workload's KV budget keeps, reads and fetches of a context; all of it where there is none."""
    if not serve.engine.kv_budget:
        return KvShares()
    return budget_shares(serve.engine.kv_budget, max(spec.kv_heads * spec.head_dim for spec in model.attentions))


def fetched_s(kept: KvShares, node: Node, token_bytes: float) -> float:
    """Return the seconds that one token of a context adds to each next token on other links than the device's: a rank's
    host link, or its part of the node's drives."""
    host_s = token_bytes / (node.copies_gb_s * 1e9)
    if not (kept.in_drive or kept.on_drives):
        return kept.fetched * host_s
    drives_s = token_bytes / (node.nvme_gb_s * 1e9 / node.devices)
    return kept.read * drives_s if kept.in_drive else kept.fetched * max(drives_s, host_s)


def wanted_s(serve: Serve) -> tuple[float, ...]:
    """Return the seconds in which a first token is wanted by class of objectives, 0 for any time; nothing where no
    class wants it."""
    found = tuple(bounds["ttft_s"].seconds if "ttft_s" in bounds else 0.0 for bounds in serve.objective_classes)
    return found if any(found) else ()


def streaming(host: HostTimes, forward: Forward, cluster: Cluster) -> HostTimes:
    """Return the host's times where layers' weights come from elsewhere: an iteration takes at least as long as they
    do, over the rank's part of its host's drives, its own link to the host, or a neighbour's port. Where the host
    computes with some of them its kernels are no graph of the device's, and what comes is counted with the products."""
    if forward.plan.serving.divides:
        return msgspec.structs.replace(host, graph_tokens=0)
    source, node = forward.plan.serving.stream, cluster.islands[0].node
    if not source:
        return host
    ranks = min(node.devices, forward.plan.layout.num_ranks)
    rate = {"disk": node.nvme_gb_s / ranks, "host": node.pcie_gb_s}
    if source == "peer":
        rate["peer"] = forward.mesh.pair(0, 1).hops[0].gb_s
    comes_s = forward.streamed_bytes(0) / (rate[source] * 1e9)
    return msgspec.structs.replace(host, eager_s=max(host.eager_s, comes_s), graph_tokens=0)


def padded(requests: Requests, batch: int) -> Requests:
    """Return requests whose prompts are as long as the longest of their batch, which takes so many as they arrive."""
    prompt = requests.prompt.copy()
    for first in range(0, len(prompt), batch):
        prompt[first : first + batch] = prompt[first : first + batch].max()
    return msgspec.structs.replace(requests, prompt=prompt)


def cache_rules(
    serve: Serve, requests: Requests, block_bytes: float, adapters: AdapterRules | None = None
) -> CacheRules:
    """Return the rules of a replica's cache. Blocks that are named in a trace count where they are shared alone."""
    return rules_of(serve.engine, unit=requests.hash_block, block_bytes=block_bytes, adapters=adapters)


def host_times(profile: EngineProfile, model: Model, serve: Serve, stages: int = 1) -> HostTimes:
    """Return what the host of an engine adds to the iterations of a model in so many pipeline stages."""
    times = stages if profile.each_stage else 1
    layers = [(model.blocks[kind], count) for kind, count in enumerate(model.layers_by_kind)]
    mixtures = sum(count for block, count in layers if isinstance(block.mlp, Moe))
    latent = sum(count for block, count in layers if any(spec.kv_lora_rank for spec in block.attentions))
    return HostTimes(
        step_s=times * profile.step_us * 1e-6,
        request_s=times * profile.request_us * 1e-6,
        eager_s=1e-6
        * (profile.layer_us * model.num_layers + profile.experts_us * mixtures + profile.latent_us * latent),
        graph_tokens=profile.graph_tokens if serve.engine.graphs else 0,
        serial_s=profile.serial_us * 1e-6,
        serial_token_s=profile.serial_token_us * 1e-6,
        stream_s=profile.stream_us * 1e-6,
        front_s=profile.front_us * 1e-6,
        token_s=profile.token_us * 1e-6,
        front_steps=profile.front_steps,
    )


def issued(host: HostTimes, forward: Forward) -> HostTimes:
    """Return host times where attention is several kernels: the host issues each of them, and a profile says what it
    takes for layers of which attention is one."""
    if not forward.unfused:
        return host
    layers = list(enumerate(forward.model.layers_by_kind))
    rest = sum(count * _kernels(forward.tokenwise(kind, 1)) for kind, count in layers)
    one = sum(mixing.layers * max(1, len(mixing.kernels)) for mixing in forward.mixing)
    several = sum(mixing.layers * _kernels(forward.cores(mixing, 1, 2, 0)) for mixing in forward.mixing)
    return msgspec.structs.replace(host, eager_s=host.eager_s * (rest + several) / (rest + one))


def _kernels(entries: list[Entry]) -> int:
    return sum(getattr(entry.work, "kernels", 1) for entry in entries)


def _block_bytes(forward: Forward, stage: int, serve: Serve, length: np.ndarray) -> float:
    """Return the bytes of a block on a rank: a request of the mean length is in so many that they hold what is kept of
    it. Sliding windows keep less of its tokens, and scans a state of fixed size beside them."""
    mean = float(length.mean())
    return forward.request_bytes(stage, mean) * serve.engine.block / mean


def kv_memory(
    forward: Forward,
    device: Device,
    profile: EngineProfile,
    serve: Serve,
    length: np.ndarray,
    tokens: int,
    batch: int,
    drafting: DraftPart | None = None,
    adapter_bytes: float = 0.0,
    taken: float = 0.0,
) -> tuple[tuple[RankMemory, ...], int]:
    """Return what the ranks of every pipeline stage hold, and the cache blocks of a replica for requests of so many
    tokens [requests]: those for which there is room on all, or as many as were said. Where nothing is kept of a
    request there are as many as a full batch of the longest could want. A draft model lies on the first stage,
    beside slots for adapters of so many bytes on every one, and bytes that are `taken` by others."""
    layout, capacity = forward.plan.layout, float(device.memory_bytes)
    groups = (layout.tp > 1) + (layout.pp > 1)
    fixed, room = [], []
    for stage in range(layout.pp):
        held = {
            "weights": forward.weight_bytes(stage),
            "workspace": forward.workspace_bytes(tokens, batch),
            "engine context": profile.context_bytes,
            "communication buffers": groups * profile.communicator_bytes,
        }
        if taken:
            held["job beside"] = taken
        if adapter_bytes:
            held["slots of adapters"] = adapter_bytes / layout.pp
        each = _block_bytes(forward, stage, serve, length)
        if drafting is not None and stage == 0:
            held["weights of the draft model"] = drafting.weight_bytes
            each += drafting.token_bytes * serve.engine.block
        share, used = serve.engine.memory, sum(held.values())
        left = (capacity - used) * share if profile.of_free else capacity * share - used
        fixed.append((held, each))
        wanted = -(-int(length.max()) // serve.engine.block) * serve.engine.max_batch
        room.append((int(left / each) if each else wanted) if left > 0 else 0)
    blocks = serve.engine.kv_blocks or max(0, min(room))
    memory = tuple(
        RankMemory(
            rank=f"stage {stage}" if layout.pp > 1 else "every rank",
            multiplicity=layout.tp,
            capacity_bytes=capacity,
            peak_bytes=sum(held.values()) + blocks * each,
            at_s=0.0,
            alive=held | {"keys and values": blocks * each},
        )
        for stage, (held, each) in enumerate(fixed)
    )
    return memory, blocks


def _budget(serve: Serve, policy: BatchPolicy, plan: Plan) -> int:
    """The token budget that was said, else the policy's for each attention group, as each has a scheduler of its own;
    the largest one where it follows from an objective."""
    usual = policy.budget * plan.layout.adp
    return MOST_BUDGET if serve.engine.budget == AUTO_BUDGET else serve.engine.budget or usual


def _largest(serve: Serve, policy: BatchPolicy, requests: Requests, plan: Plan) -> int:
    """Tokens of the largest iteration: the budget, or where there is none every prompt of a batch."""
    budget = _budget(serve, policy, plan)
    if not budget:
        return int(np.sort(requests.prompt)[::-1][: serve.engine.max_batch].sum())
    longest = int((requests.prompt + requests.output).max()) if policy.name == "vllm-v0" else 0
    return max(budget, longest) + serve.engine.max_batch * (1 + serve.engine.guesses)


def served_by(
    serve: Serve, replica: Replica, requests: Requests, replicas: int
) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the requests of every replica that has any, and what became of them."""
    router = serving.get("routing", serve.engine.routing)
    if len(requests.needed) or (replicas > 1 and (router.looks or len(requests.after))):
        return simulate_routed(replica, replicas, requests, router)
    shares = dealt(serve, requests, replicas)
    return shares, [simulate(replica, share) for share in shares]


def dealt(serve: Serve, requests: Requests, replicas: int) -> list[Requests]:
    """Return the requests of every replica that has any, of a router that does not look; a closed loop's open requests
    are shared out too."""
    if replicas == 1:
        return [requests]
    where = serving.get("routing", serve.engine.routing).assign(requests, replicas)
    shares = [requests.chosen(np.flatnonzero(where == one)) for one in range(replicas)]
    loops = [requests.concurrency // replicas + (one < requests.concurrency % replicas) for one in range(replicas)]
    if requests.concurrency:
        shares = [msgspec.structs.replace(share, concurrency=max(1, n)) for share, n in zip(shares, loops)]
    return [share for share in shares if len(share)]
