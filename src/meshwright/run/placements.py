"""The collectives between two placements, carried out by real processes: every rank against what ``layers/algebra.py``
simulates for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from meshwright.layers import algebra
from meshwright.layers.algebra import PARTIAL, REPLICATE, AxisMesh, Placement, Transfer
from meshwright.run import launch
from meshwright.run.world import World


def apart(mesh: AxisMesh, pairs: Sequence[tuple[Placement, Placement]], shape: Sequence[int]) -> float:
    """The largest difference on any rank, over pairs of placements of a tensor of `shape`, between what real
    collectives leave and what simulated ones do; infinite where shapes differ.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    ranks = len(list(mesh.ranks))
    return launch.start(_compare, mesh, tuple(pairs), tuple(shape), num_ranks=ranks, device="cpu", timeout_s=60.0)


def _compare(world: World, mesh: AxisMesh, pairs: tuple, shape: tuple[int, ...]) -> float:
    coordinates = list(mesh.ranks)
    me, groups = coordinates[world.rank], groups_along(mesh, world.rank)
    tensor, worst = np.random.default_rng(0).standard_normal(shape), 0.0
    for source, target in pairs:
        simulated = algebra.distribute(mesh, source, tensor, seed=1)
        real = torch.from_numpy(simulated[me].copy())
        for one in algebra.transfers(mesh, source, target, shape):
            axis = [name for name, _ in mesh.axes].index(one.axis)
            real = carried(one, axis, real, mesh.sizes[axis], me[axis], groups[axis])
            simulated = algebra.carry_out(mesh, one, simulated)
        same = real.shape == simulated[me].shape
        worst = max(worst, float(np.abs(real.numpy() - simulated[me]).max(initial=0.0)) if same else float("inf"))
    most = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def groups_along(mesh: AxisMesh, rank: int) -> list[dist.ProcessGroup | None]:
    """This rank's process group along each axis."""
    coordinates = list(mesh.ranks)
    out: list[dist.ProcessGroup | None] = [None] * len(mesh.axes)
    for axis in range(len(mesh.axes)):
        for rest in dict.fromkeys((*at[:axis], *at[axis + 1 :]) for at in coordinates):
            members = [i for i, at in enumerate(coordinates) if (*at[:axis], *at[axis + 1 :]) == rest]
            group = dist.new_group(members)
            if rank in members:
                out[axis] = group
    return out


def carried(one: Transfer, axis: int, x: torch.Tensor, size: int, me: int, group) -> torch.Tensor:
    """Carry out one transfer and return this rank's tensor after it."""
    before, after = one.before[axis], one.after[axis]
    if one.op == "slice":
        return x.tensor_split(size, dim=after)[me].contiguous()
    if one.op == "all_reduce":
        # terms that einsums left in another order on another rank are added up by their places, not by their order
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out
    if one.op == "keep" and before == REPLICATE:
        return x if me == 0 else torch.zeros_like(x)
    if one.op == "keep":
        shards = [x if i == me else x.new_zeros(s) for i, s in enumerate(_shapes(x, size, group))]
        return torch.cat(shards, dim=before)
    if one.op == "all_gather":
        return torch.cat(exchanged([x] * size, _shapes(x, size, group), group), dim=before)
    pieces = [p.contiguous() for p in x.tensor_split(size, dim=after)]
    if before == PARTIAL:
        return torch.stack(exchanged(pieces, [pieces[me].shape] * size, group)).sum(0)
    lengths = [s[before] for s in _shapes(x, size, group)]
    shapes = [(*pieces[me].shape[:before], n, *pieces[me].shape[before + 1 :]) for n in lengths]
    return torch.cat(exchanged(pieces, shapes, group), dim=before)


def _shapes(x: torch.Tensor, size: int, group) -> list[tuple[int, ...]]:
    """The shape of every member's part."""
    found = [torch.empty(x.dim(), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(found, torch.tensor(x.shape), group=group)
    return [tuple(s.tolist()) for s in found]


def exchanged(pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group) -> list[torch.Tensor]:
    """A piece to every member, for one of each: ragged shards have no collective of their own."""
    sent = torch.cat([p.flatten() for p in pieces])
    sizes = [torch.Size(s).numel() for s in shapes]
    got = sent.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent, sizes, [p.numel() for p in pieces], group=group)
    return [part.view(tuple(s)) for part, s in zip(got.split(sizes), shapes)]
