"""Kinds of data-parallel slices: replicas of the pipeline that run on the same devices in the same order.

On equal devices all slices are one kind. On unequal islands a slice is known by the device of each of its pipeline
ranks, the slowest of the tensor- and context-parallel ranks there; kinds are numbered in the order of their first rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from meshwright.plan.facets.layout import Layout
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.hardware import Device


class SliceKind(NamedTuple):
    """The ``members`` (indices along dp) of one kind, and the device of each pipeline rank."""

    members: tuple[int, ...]
    devices: tuple[Device, ...]


def kinds(layout: Layout, cluster: Cluster) -> tuple[SliceKind, ...]:
    """The kinds of slices of a layout whose ranks are all on the cluster."""
    if len(cluster.islands) == 1:
        return (SliceKind(tuple(range(layout.dp)), (cluster.islands[0].device,) * layout.pp),)
    bounds = tuple((island.num_devices, island.device.name) for island in cluster.islands)
    sizes = (layout.tp, layout.cp, layout.dp, layout.pp)
    speed = {i.device.name: _fastest(i.device) for i in cluster.islands}
    device = {i.device.name: i.device for i in cluster.islands}
    found = _kinds(sizes, tuple(layout.stride(a) for a in ("tp", "cp", "dp", "pp")), bounds, tuple(speed.items()))
    return tuple(SliceKind(members, tuple(device[name] for name in names)) for members, names in found)


def _fastest(device: Device) -> float:
    """The highest peak of floating-point products, in FLOP/s: steps are made of these, and an older device may multiply
    whole numbers of few bits faster than a newer one. Of all products where it has no others."""
    peaks = device.peak_flops
    return max((rate for dtype, rate in peaks.items() if not dtype.startswith("int")), default=max(peaks.values()))


class Portions(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step that every data-parallel slice has, in their order, () for what all have alike: ``counts`` of
    microbatches, ``rows`` in each of them, relative sizes of what each rank holds of sharded state (``hold``), and the
    precision it computes in (``dtypes``), and the operators that it lowers (``lowered``)."""

    counts: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    hold: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()


def portions_of(plan: Plan, cluster: Cluster) -> Portions:
    """The portions of the slices of a plan whose ranks are all on the cluster."""
    layout, found = plan.layout, kinds(plan.layout, cluster)

    def each(values: tuple) -> tuple:
        of = {d: value for kind, value in zip(found, values) for d in kind.members}
        return tuple(of[d] for d in range(layout.dp)) if values else ()

    own = plan.kinds
    return Portions(
        counts=each(layout.shares),
        rows=each(own.mbs),
        hold=each(own.hold),
        dtypes=each(own.dtypes),
        lowered=each(own.lowered),
    )


def own_plan(plan: Plan, portions: Portions, slice: int) -> Plan:
    """The plan that a data-parallel slice runs by itself, without the words that say what each kind has."""
    rows = portions.rows[slice] if portions.rows else 0
    dtype = portions.dtypes[slice] if portions.dtypes else ""
    lowered = portions.lowered[slice] if portions.lowered else plan.kinds.lowered[0] if plan.kinds.lowered else ""
    layout = msgspec.structs.replace(plan.layout, shares=())
    return on_kind(msgspec.structs.replace(plan, layout=layout), rows, dtype, lowered)


def on_kind(plan: Plan, rows: int, dtype: str, lowered: str = "") -> Plan:
    """The plan of slices with so many sequences in a microbatch (0: the plan's) that compute in a precision ("": the
    plan's) and have some operators `lowered` ("": none)."""
    kinds = type(plan.kinds)(lowered=(lowered,) if lowered else ())
    plan = msgspec.structs.replace(plan, kinds=kinds)
    pipeline, precision = plan.pipeline, plan.precision
    pipeline = msgspec.structs.replace(pipeline, microbatch=rows or pipeline.microbatch)
    precision = msgspec.structs.replace(precision, compute=dtype or precision.compute)
    return msgspec.structs.replace(plan, pipeline=pipeline, precision=precision)


def meet_inside(layout: Layout, experts: int, found: tuple[SliceKind, ...]) -> bool:
    """Whether exchanges inside layers over `experts` neighbouring ranks (ep x etp) stay between slices of one kind."""
    across = experts // (layout.tp * layout.cp)
    kind_of = {d: k for k, kind in enumerate(found) for d in kind.members}
    blocks = (range(a, min(a + across, layout.dp)) for a in range(0, layout.dp, across)) if across > 1 else ()
    return all(len({kind_of[d] for d in block}) == 1 for block in blocks)


@lru_cache(maxsize=4096)
def _kinds(sizes: tuple, strides: tuple, bounds: tuple, speeds: tuple) -> tuple:
    """(members, device names by pipeline rank) of every kind, from plain numbers."""
    (tp, cp, dp, pp), (by_tp, by_cp, by_dp, by_pp), speed = sizes, strides, dict(speeds)
    reach = (tp - 1) * by_tp + (cp - 1) * by_cp
    ends, total = [], 0
    for count, name in bounds:
        total += count
        ends.append((total, name))

    def on(rank: int) -> str:
        return next(name for end, name in ends if rank < end)

    def slowest(start: int) -> str:
        return min((on(start), on(start + reach)), key=lambda name: speed[name])

    folded: dict[tuple[str, ...], list[int]] = {}
    for d in range(dp):
        folded.setdefault(tuple(slowest(d * by_dp + r * by_pp) for r in range(pp)), []).append(d)
    return tuple((tuple(members), names) for names, members in folded.items())
