"""Sizes of tiers: what each transfer moves and at which rate, and what a rank keeps in every tier all the time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright.lower.place import Mesh
from meshwright.lower.program import Program, Site
from meshwright.lower.roles import HostRole, TransferRole
from meshwright.lower.state import gathered_bytes, static_bytes, updated_bytes
from meshwright.lower.units import Unit, composition_of
from meshwright.plan.facets.offload import HOST, NVME
from meshwright.spec.hardware import Node
from meshwright.spec.workload import STORED_BYTES
from meshwright.sync.fragments import expert_scope
from meshwright.work import Elementwise, TierCopy

if TYPE_CHECKING:
    from meshwright.lower.stages import Stages

#: Begin of a copy between device and host, and of a request to drives, microseconds: what issuing an asynchronous copy
#: takes, and the read latency that datasheets of data-centre NVMe drives give (Samsung PM9A3: 80 us).
COPY_US, DRIVE_US = 10.0, 80.0
#: Memory that passes of an addition go through: two numbers read, their sum written.
ADDED = 3.0
#: Categories of what lies off the device, beside those that it would have there.
STAGING = "buffers"


#: What is moved, and where, in words.
STATE_WORDS = {"weights": "updated parameters", "params": "parameters", "grads": "gradients", "optimizer": "moments"}
WAY_WORDS = {"h2d": "to the device", "d2h": "to the host", "nvme_read": "from drives", "nvme_write": "to drives"}


def rate_gb_s(node: Node, ranks: int, way: str) -> float:
    """Bandwidth that one of a node's ranks has, which all move state at once: its own link to the host, a share of the
    host's memory and drives."""
    share = node.streamed_gb_s / ranks
    if way in ("h2d", "d2h"):
        return node.copies_gb_s
    return {"host": share, "nvme_read": node.nvme_gb_s / ranks, "nvme_write": node.writes_gb_s / ranks}[way]


def sharers(mesh: Mesh, start: int) -> tuple[Node, int]:
    """The node that a rank is on, and how many of the plan's ranks are on it."""
    node = mesh.cluster.island_of(start).node
    return node, max(1, min(node.devices, mesh.num_ranks))


def weight_bytes(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Bytes of some layers' computing copy of parameters that one rank keeps: its shard under ZeRO-3."""
    plan, params = stages.plan, stages.total_params(units)
    if plan.layout.zero < 3:
        kept = static_bytes(plan, stages.train, params)
        return kept["parameters"]
    experts = expert_scope(plan)
    whole = gathered_bytes(plan, params, stages.train)
    held = params.dense + params.expert
    share = (params.dense / plan.layout.shard_group + params.expert / experts) / held if held else 0.0
    return whole * share


def gradient_bytes(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Bytes of the gradients that one rank's update of some layers needs."""
    return updated_params(stages, units) * STORED_BYTES[stages.plan.precision.grads]


def updated_params(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Parameters of some layers that one rank's optimizer touches."""
    plan, params = stages.plan, stages.total_params(units)
    share = (plan.layout.shard_group, expert_scope(plan)) if plan.layout.zero else (1, 1)
    return params.trained_dense / share[0] + params.trained_expert / share[1]


def optimizer_bytes(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Bytes of moments and masters of some layers on one rank. A host that is no device has masters of its own, where
    the device shards them (ZeRO-3) or computes with them (fp32)."""
    plan = stages.plan
    kept = static_bytes(plan, stages.train, stages.total_params(units))["optimizer"]
    master = 4.0 if is_fp32(stages) else STORED_BYTES[plan.precision.master]
    if plan.layout.zero == 3 or is_fp32(stages):
        kept += 0.0 if is_fp32(stages) and same_memory(stages) else updated_params(stages, units) * master
    return kept


def is_fp32(stages: Stages) -> bool:
    """Whether parameters are computed with as they are updated."""
    return (stages.plan.precision.compute or stages.train.dtype) == "fp32"


def same_memory(stages: Stages) -> bool:
    """Whether the devices are processor cores, whose memory is the host's."""
    return stages.mesh.cluster.islands[0].device.synchronous


def saved_bytes(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Bytes that one microbatch leaves in some layers, without logits."""
    found = stages.activations(composition_of(units))
    return found.saved - found.logits


def moved_bytes(stages: Stages, what: str, units: tuple[Unit, ...]) -> float:
    """Bytes of one transfer of some layers' state."""
    if what == "weights":
        trained = stages.total_params(units)
        held = trained.dense + trained.expert
        element = gathered_or_whole(stages, units) / held if held else 0.0
        return updated_params(stages, units) * element
    sizes = {
        "params": weight_bytes,
        "grads": gradient_bytes,
        "optimizer": optimizer_bytes,
        "activations": saved_bytes,
    }
    return sizes[what](stages, units)


def gathered_or_whole(stages: Stages, units: tuple[Unit, ...]) -> float:
    """Bytes of some layers' parameters as they are computed with, before they are sharded."""
    plan = stages.plan
    if plan.layout.zero == 3:
        return gathered_bytes(plan, stages.total_params(units), stages.train)
    return static_bytes(plan, stages.train, stages.total_params(units))["parameters"]


def transfer(role: TransferRole, stages: Stages, mesh: Mesh, site: Site, start: int) -> Program:
    """The program of a transfer."""
    node, ranks = sharers(mesh, start)
    size = moved_bytes(stages, role.what, role.units)
    copies = role.way in ("h2d", "d2h")
    latency = COPY_US if copies else DRIVE_US
    stays = role.what == "activations" and not stages.moves
    if stays or (copies and same_memory(stages)):  # nothing to copy: it is there
        size = latency = 0.0
    whole = stages.plan.memory.recompute == "full" and not stages.plan.memory.layers
    work = TierCopy(
        num_bytes=size,
        gb_s=rate_gb_s(node, ranks, role.way),
        latency_us=latency,
        way=role.way,
        saved=role.what == "activations" and not whole,
    )
    return Program(
        kind="transfer", name=f"{STATE_WORDS.get(role.what, role.what)} {WAY_WORDS[role.way]}", site=site, work=work
    )


def host_work(role: HostRole, stages: Stages, mesh: Mesh, site: Site, start: int) -> Program:
    """The program of what the host's processor computes: it streams through its memory."""
    node, ranks = sharers(mesh, start)
    if same_memory(stages):  # as the device does it
        size = updated_params(stages, role.units) * updated_bytes(stages.plan, stages.train)
        size = ADDED * gradient_bytes(stages, role.units) if role.what == "sum" else size
        work = Elementwise(num_bytes=size, kernels=8, fused=True, operator="optimizer" * (role.what == "update"))
        return Program(kind="update", name="optimizer", site=site, work=work, share=_share(role, stages))
    if role.what == "sum":
        size, name = ADDED * gradient_bytes(stages, role.units), "gradients added by the host"
    else:
        size = updated_params(stages, role.units) * updated_bytes(stages.plan, stages.train)
        name = "update by the host"
    work = TierCopy(num_bytes=size, gb_s=rate_gb_s(node, ranks, "host"), latency_us=COPY_US, way="host")
    return Program(kind="transfer", name=name, site=site, work=work, which=role.what, share=_share(role, stages))


def _share(role: HostRole, stages: Stages) -> float:
    """The part of a rank's update that is of these layers; 0 of other work."""
    whole = sum(updated_params(stages, one.units) for one in stages.compositions) / stages.plan.layout.pp
    return updated_params(stages, role.units) / whole if role.what == "update" and whole else 0.0


def _most(sizes: Iterable[float], room: int) -> float:
    """Bytes of the `room` largest."""
    return sum(sorted(sizes, reverse=True)[:room])


def least_kept(stages: Stages, unit: Unit) -> dict[str, float]:
    """The least bytes of a layer's state by category that stay on the device, whichever layers of a stage are moved."""
    offload, kept = stages.plan.offload, static_bytes(stages.plan, stages.train, stages.params(unit))
    if offload.params:
        kept["parameters"] = 0.0
    elif offload.optimizer:
        kept["parameters"] = min(kept["parameters"], weight_bytes(stages, (unit,)))
    for what, category in (("grads", "gradients"), ("optimizer", "optimizer")):
        if getattr(offload, what):
            kept[category] = 0.0
    return kept


def tier_bytes(stages: Stages, held: list[int]) -> dict[str, dict[str, float]]:
    """Constant bytes by tier ("" is the device) and category of a rank that holds these stages: state where it lies,
    and room for what is on its way."""
    offload, room = stages.plan.offload, stages.plan.offload.prefetch + 1
    out: dict[str, dict[str, float]] = {tier: {} for tier in ("", HOST, NVME)}
    weights, grads, states, saved = [], [], [], []

    def keep(tier: str, category: str, size: float) -> None:
        out[tier][category] = out[tier].get(category, 0.0) + size

    for stage in held:
        segments = stages.compositions[stage].segments
        by_host = offload.moved("optimizer", len(segments))
        for number, units in enumerate(segments):
            whole = static_bytes(stages.plan, stages.train, stages.total_params(units))
            away = number < by_host
            weight, state = weight_bytes(stages, units), optimizer_bytes(stages, units)
            keep(offload.params, "parameters", weight if away else whole["parameters"])
            keep(offload.optimizer if away else "", "optimizer", state if away else whole["optimizer"])
            keep(offload.grads if away else "", "gradients", whole["gradients"])
            if away and not offload.grads and not same_memory(stages):  # what has arrived waits for the norm of all
                keep(HOST, "gradients", gradient_bytes(stages, units))
            weights.append(weight)
            grads.append(whole["gradients"])
            states += [state] if away else []
            saved.append(saved_bytes(stages, units))
    if offload.params:
        keep("", "parameters", _most(weights, room))
    if offload.grads:
        keep("", "gradients", _most(grads, room))
    if offload.optimizer and not offload.params:
        keep(HOST, STAGING, _most(weights, room))
    for tier, sizes in (
        (offload.params, weights),
        (offload.grads, grads),
        (offload.optimizer, states),
        (offload.activations, saved),
    ):
        if tier == NVME:
            keep(HOST, STAGING, _most(sizes, room))
    if same_memory(stages):
        for category, size in out.pop(HOST).items():
            keep("", category, size)
        out[HOST] = {}
    for category in ("parameters", "gradients", "optimizer"):
        out[""].setdefault(category, 0.0)
    return {tier: {c: size for c, size in kept.items() if size or not tier} for tier, kept in out.items()}
