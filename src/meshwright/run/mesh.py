"""The device mesh of a plan for one process: which ranks share each axis, and the process groups between them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
import torch.distributed as dist

from meshwright.plan import Layout, Plan
from meshwright.plan.facets.sequence import STATIC
from meshwright.run import turns as turns_of
from meshwright.run.turns import PieceTurns
from meshwright.sync.paths import MODULE, ModulePaths
from meshwright.sync.policy import read
from meshwright.sync.scoped import nested

AXES = ("tp", "cp", "dp", "pp")
#: Axes of the expert mesh from the inside out: a factorisation of tp*cp*dp of its own (2504.14960).
EXPERT_AXES = ("etp", "ep", "edp")
#: What flows between stages: forward or backward, to a higher or a lower rank.
CHANNELS = ("pp_forward_up", "pp_forward_down", "pp_backward_up", "pp_backward_down")
#: What frozen layers make in waits, on its way to the first rank of a pipeline.
FROZEN = "pp_frozen"
#: Beginnings of the names of groups at both ends of a link between pools.
LINKS = ("link_forward:", "link_backward:")
#: Beginning of the names of groups that are formed for every batch.
GROUPED = "groups"
#: Groups that experts' tokens travel in.
TOKENS = ("ep", "ep_inner", "ep_outer")
#: Groups with communicators of their own, as those of links have, though others may have the same ranks: a layer waits
#: for what flows there, and must not wait for the gradients of the layers behind it, which replicas exchange meanwhile.
APART = (*CHANNELS, FROZEN, "cp_inner", "cp_outer", *TOKENS)


class AxisGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that share one axis with this process, in axis order; ``index`` is this process among them.
    ``handle`` is the process group, None when it is alone; ``turns`` are what lets the tokens that travel here pass."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    turns: PieceTurns | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1


class ProcessMesh(msgspec.Struct, frozen=True, kw_only=True):
    """The position of this process on every axis of the mesh, and its groups.

    ``groups`` holds tp, cp, dp, pp; ``cp_inner``, neighbours on cp that swap heads, and ``cp_outer``, the ranks at
    one place of each such set, that do the other exchange; ``data`` (dp and cp together: replicas of a dense
    parameter); ``shard`` and ``replica``, the hybrid-sharding split of ``data``; ``weight_shard``, ``gradient_shard``
    and ``optimizer_shard``, the nested scopes of its state where each kind has one; etp, ep, edp of the expert mesh;
    ``ep_inner`` and ``ep_outer``, runs of neighbours on ep and the ranks at one place of each, where tokens are
    exchanged in two steps; ``expert_shard`` and ``expert_replica``, the same split of edp; :data:`CHANNELS`, the pp
    ranks again with handles of their own, so that what flows in different directions never queues behind each other;
    ``ends``, the first and last rank of each pipeline, and ``mirror``, a rank and its opposite in a pipeline;
    ``worker``, all ranks that take the same optimizer step; ``module0`` and on, those that hold the same module of a
    level, where replicas' models are made of modules; ``self``; ``world``; and, where groups are formed for
    every batch, those of every size.
    """

    plan: Plan
    rank: int
    world: int
    device: torch.device
    coordinates: dict[str, int]
    groups: dict[str, AxisGroup]

    def __getitem__(self, name: str) -> AxisGroup:
        return self.groups[name]

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Place of a global rank on each axis, by the plan's order."""
    out = {}
    for axis in plan.layout.order:
        rank, out[axis] = divmod(rank, getattr(plan.layout, axis))
    return out


def expert_coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Place of a global rank on the expert mesh: tp*cp*dp in the plan's order, refactored from the inside out."""
    place, inner, stride = coordinates(plan, rank), 0, 1
    for axis in plan.layout.order:
        if axis != "pp":
            inner += place[axis] * stride
            stride *= getattr(plan.layout, axis)
    out = {}
    for axis, size in zip(EXPERT_AXES, (plan.etp, plan.experts.ep, plan.edp)):
        inner, out[axis] = divmod(inner, size)
    return out | {"pp": place["pp"]}


def members(plan: Plan) -> dict[str, list[tuple[int, ...]]]:
    """For every kind of group, all groups of the job, each in axis order."""
    ranks = range(plan.layout.num_ranks)
    places = [coordinates(plan, r) for r in ranks]
    experts = [expert_coordinates(plan, r) for r in ranks]
    data = ("dp", "cp")
    out = {axis: _together(places, (axis,)) for axis in AXES}
    out["cp_inner"], out["cp_outer"] = _split(out["cp"], plan.sequence.ulysses)
    if plan.experts.ep_inner > 1:
        out["ep_inner"], out["ep_outer"] = _split(_together(experts, ("ep",)), plan.experts.ep_inner)
    out["data"] = _together(places, data)
    out |= {axis: _together(experts, (axis,)) for axis in EXPERT_AXES}
    scope = plan.layout.shard_group
    out["shard"], out["replica"] = _split(out["data"], scope)
    rest = out["data"]
    for among in nested(plan):
        out[among.name], rest = _split(rest, among.size)
    edp = plan.edp
    edp_scope = min(edp, scope)
    out["expert_shard"], out["expert_replica"] = _split(out["edp"], edp_scope if edp % edp_scope == 0 else edp)
    policy = read(plan.sync.policy)
    out["worker"] = _workers(out["data"], together := policy.rule.together(plan))
    for level in range(len(policy.paths.levels) if policy.paths is not None else 0):
        out[f"{MODULE}{level}"] = _modules(out["data"], together, policy.paths, level)
    out |= dict.fromkeys(CHANNELS, out["pp"])
    if plan.pipeline.fill or plan.pipeline.filling:
        out[FROZEN] = out["pp"]
    out["ends"] = sorted({(group[0], group[-1]) for group in out["pp"] if len(group) > 1})
    if plan.sequence.groups != STATIC:
        sizes = [1 << k for k in range(1, (plan.layout.dp * plan.layout.cp).bit_length())]
        out |= {group_name(size): _split(out["data"], size)[0] for size in sizes}
    out["mirror"] = [
        pair for group in out["pp"] for pair in zip(group, reversed(group)) if group.index(pair[0]) < len(group) // 2
    ]
    out["self"] = [(r,) for r in ranks]
    out["world"] = [tuple(ranks)]
    return out


def group_name(size: int) -> str:
    """Return the name of the groups of so many neighbours that share documents."""
    return f"{GROUPED}{size}"


def _workers(data: Iterable[tuple[int, ...]], together: int) -> list[tuple[int, ...]]:
    """All ranks of the job whose places in their data-parallel groups are in the same run of `together`."""
    found: dict[int, list[int]] = {}
    for group in data:
        for place, rank in enumerate(group):
            found.setdefault(place // together, []).append(rank)
    return [tuple(sorted(ranks)) for ranks in found.values()]


def _modules(data: Iterable[tuple[int, ...]], together: int, paths: ModulePaths, level: int) -> list[tuple[int, ...]]:
    """The ranks at one place of the replicas that hold the same module of a level."""
    return [
        tuple(group[replica * together + place] for replica in some)
        for group in data
        for place in range(together)
        for some in paths.modules(level, len(group) // together)
    ]


def _together(places: list[dict[str, int]], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Ranks that differ on `axes` only; within a group in the order of the axes, the last one fastest."""
    found: dict[tuple, list[tuple[tuple[int, ...], int]]] = {}
    for rank, place in enumerate(places):
        rest = tuple(v for axis, v in place.items() if axis not in axes)
        found.setdefault(rest, []).append((tuple(place[a] for a in axes), rank))
    return [tuple(rank for _, rank in sorted(group)) for group in found.values()]


def _split(groups: Iterable[tuple[int, ...]], scope: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Every group cut into runs of `scope` neighbours, and the ranks at equal places of those runs."""
    runs, across = [], []
    for group in groups:
        parts = [group[i : i + scope] for i in range(0, len(group), scope)]
        runs += parts
        across += list(zip(*parts))
    return runs, across


def alone(*, device: torch.device | None = None) -> ProcessMesh:
    """The mesh of a plan of one rank, whatever job this process is in: nothing is exchanged."""
    plan = Plan(layout=Layout(dp=1))
    groups = {name: AxisGroup(name=name, ranks=(0,), index=0) for name, sets in members(plan).items() if sets}
    place = coordinates(plan, 0) | expert_coordinates(plan, 0)
    return ProcessMesh(
        plan=plan, rank=0, world=1, device=device or torch.device("cpu"), coordinates=place, groups=groups
    )


def end(place: ProcessMesh) -> None:
    """End the process groups of a mesh, once all ranks of the job are done with them; collective. A group of gloo has a
    thread that looks 100 times a second for as long as the group is there: a job of many plans ends those of each.
    """
    handles = {id(group.handle): group.handle for group in place.groups.values() if group.handle is not None}
    if dist.is_initialized():
        dist.barrier()
    for handle in handles.values():
        dist.destroy_process_group(handle)


def build(plan: Plan, *, device: torch.device | None = None) -> ProcessMesh:
    """The mesh of this process, with a process group for every set of more than one rank.

    Every process of the job must call this with the same plan, after ``init_process_group`` (or without it, alone).

    Raises:
        ValueError: the job has another number of processes than the plan has ranks.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world != plan.num_ranks:
        raise ValueError(f"{world} processes for a plan of {plan.num_ranks} ranks")
    handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    mine, groups, begin = plan, {}, 0
    for pool in plan.pools:
        first = pool.devices[0] if pool.devices else 0
        sets = {name: [tuple(first + r for r in ranks) for ranks in some] for name, some in members(pool.plan).items()}
        made = _made(sets, rank, handles)
        if rank in range(first, first + pool.plan.layout.num_ranks):
            mine, groups, begin = pool.plan, made, first
    groups |= _made({name: [ranks] for name, ranks in between(plan).items()}, rank, handles)
    if mine.overlap.yield_mb:
        turns = PieceTurns(mine.overlap.yield_mb * turns_of.MB)
        groups |= {name: msgspec.structs.replace(groups[name], turns=turns) for name in TOKENS if name in groups}
    return ProcessMesh(
        plan=mine,
        rank=rank,
        world=world,
        device=device or torch.device("cpu"),
        coordinates=coordinates(mine, rank - begin) | expert_coordinates(mine, rank - begin),
        groups=groups,
    )


def _made(
    sets: dict[str, list[tuple[int, ...]]], rank: int, handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
) -> dict[str, AxisGroup]:
    """The groups that a rank is in, by name; every process creates every group, in one order, whether or not it is in
    it."""
    groups = {}
    for name, some in sets.items():
        own = name if name in APART or name.startswith((*LINKS, GROUPED)) else ""
        for ranks in some:
            if len(ranks) > 1 and (own, ranks) not in handles:
                handles[own, ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                handle = handles.get((own, ranks))
                groups[name] = AxisGroup(name=name, ranks=ranks, index=ranks.index(rank), handle=handle)
    return groups


def between(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The groups that join pools: all ranks, which step together, and those at both ends of every link, one group a
    direction; none where there is one pool."""
    if not plan.several:
        return {}
    everyone = tuple(range(plan.num_ranks))
    out = {"world": everyone, "worker": everyone}
    held = {pool.name: range(*pool.devices) for pool in plan.pools}
    for link in plan.links:
        ranks = tuple(sorted((*held[link.source], *held[link.target])))
        out |= {f"{way}{link.source}:{link.target}": ranks for way in LINKS}
    return out
