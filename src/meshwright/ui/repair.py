"""The nearest legal plan: the further changes with which a plan keeps the words that its user just said.

Legality says what is wrong (:func:`meshwright.plan.check`); each code has the changes that can mend it, the smallest
first. Mending goes on, always with the change that leaves the fewest violations, until nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from heapq import nsmallest
from math import log2

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan import Plan, check
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: (facet, field) of a plan.
Field = tuple[str, str]
#: Changes made one after the other before a plan is given up.
MOST_CHANGES = 6
#: Plans looked at before the nearest one is given up; a look takes some 15 us.
MOST_PLANS = 2_000
#: Largest values that are offered for an axis, a microbatch and chunks.
MOST_RANKS, MOST_MICROBATCH, MOST_CHUNKS = 4096, 64, 40
AXES = ("tp", "pp", "cp")
#: Sizes of the axes that are tried where some do not suit.
MOST_SIZES = 40


class Effort:
    """A counter of the plans that may still be tried: a page cannot wait for a repair that is nowhere near."""

    def __init__(self, plans: int = MOST_PLANS):
        self.left = plans


class RepairPlace(msgspec.Struct, frozen=True):
    """The limits of a repair: what a plan must be legal for, the fields that stay as they are, and the effort left."""

    model: Model
    cluster: Cluster
    train: Train
    pinned: frozenset[Field] = frozenset()
    effort: Effort = msgspec.field(default_factory=Effort)

    def wrong(self, plan: Plan) -> list[Diagnostic]:
        self.effort.left -= 1
        return check(plan, self.model, self.cluster, self.train)


def changed(plan: Plan, facet: str, **values: object) -> Plan:
    """`plan` with other values in one facet."""
    return msgspec.structs.replace(plan, **{facet: msgspec.structs.replace(getattr(plan, facet), **values)})


def nearest(plan: Plan, place: RepairPlace) -> Plan | None:
    """A legal plan that keeps the pinned fields of `plan` and as much of the rest as can be; None when none is found.
    ``dp`` stays open unless it is pinned."""
    if ("layout", "dp") not in place.pinned:
        plan = changed(plan, "layout", dp=0)
    for _ in range(MOST_CHANGES):
        found = place.wrong(plan)
        if not found:
            return _plain(plan, place)
        ways = [way for d in found for way in _ways(d.code, plan, place)]
        ways = [way for way in dict.fromkeys(ways) if way != plan and _kept(plan, way, place.pinned)]
        scored = [(len(place.wrong(way)), i) for i, way in enumerate(ways[: max(0, place.effort.left)])]
        if not scored:
            return None
        plan = ways[min(scored)[1]]
    return _plain(plan, place) if not place.wrong(plan) else None


def _plain(plan: Plan, place: RepairPlace) -> Plan:
    """One chunk a rank is not interleaved, whoever asked for one."""
    pipeline = plan.pipeline
    if pipeline.schedule != "interleaved" or pipeline.vpp > 1 or ("pipeline", "schedule") in place.pinned:
        return plan
    return changed(plan, "pipeline", schedule="1f1b")


def _kept(before: Plan, after: Plan, pinned: frozenset[Field]) -> bool:
    return all(getattr(getattr(before, f), n) == getattr(getattr(after, f), n) for f, n in pinned)


def _ways(code: str, plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    """Changes that may mend a violation, the smallest first."""
    for mend in _MENDING.get(code, (_pipeline,) if code.startswith("S") else ()):
        yield from mend(plan, place)


def _axes(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    """Other sizes of tp, pp and cp that use every device, the nearest first."""
    layout, devices = plan.layout, place.cluster.num_devices
    dp = layout.dp if ("layout", "dp") in place.pinned else 0
    now = tuple(getattr(layout, axis) for axis in AXES)
    fixed = tuple(("layout", axis) in place.pinned for axis in AXES)
    for tp, pp, cp in _sizes(devices, min(place.model.num_layers, MOST_RANKS), dp, now, fixed):
        yield changed(plan, "layout", tp=tp, pp=pp, cp=cp, stages=layout.stages if pp == layout.pp else ())


@lru_cache(maxsize=512)
def _sizes(
    devices: int, layers: int, dp: int, now: tuple[int, ...], fixed: tuple[bool, ...]
) -> tuple[tuple[int, int, int], ...]:
    """The nearest sizes of tp, pp and cp whose product divides the devices, some fixed; times `dp` if that is said."""
    found = []
    for sizes in _triples(devices, layers):
        product = sizes[0] * sizes[1] * sizes[2]
        if (dp and product * dp != devices) or any(f and a != b for f, a, b in zip(fixed, now, sizes)):
            continue
        # an axis that was not used is opened last, of these tp first and cp last
        new = sum(2.0 + 0.1 * i for i, (a, b) in enumerate(zip(now, sizes)) if a == 1 < b)
        far = sum(abs(log2(a / b)) for a, b in zip(now, sizes))
        found.append((far + new, sizes))
    return tuple(sizes for _, sizes in nsmallest(MOST_SIZES, found))


@lru_cache(maxsize=64)
def _triples(devices: int, layers: int) -> tuple[tuple[int, int, int], ...]:
    """Sizes of tp, pp and cp whose product divides the devices."""
    sides = divisors(devices)
    return tuple(
        (tp, pp, cp)
        for tp in sides
        for pp in sides
        if pp <= layers and devices % (tp * pp) == 0
        for cp in sides
        if devices % (tp * pp * cp) == 0
    )


@lru_cache(maxsize=256)
def divisors(number: int, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Divisors of a number up to `most`, in order."""
    return tuple(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _tensor(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    for tp in _by_distance(divisors(place.cluster.num_devices), plan.layout.tp):
        yield changed(plan, "layout", tp=tp)


def _context(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    yield changed(plan, "sequence", ulysses=1)
    yield changed(plan, "sequence", ulysses=1, algorithm="ring")
    for cp in _by_distance(divisors(place.cluster.num_devices), plan.layout.cp):
        yield changed(plan, "layout", cp=cp)


def _pipeline(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    """Other chunks under the same schedule, then the plain schedules, even stages."""
    pp = plan.layout.pp
    family = schedules.get(plan.pipeline.schedule)
    fitting = family.vpps or range(1, min(place.model.num_layers // max(pp, 1), MOST_CHUNKS) + 1)
    for vpp in _by_distance(fitting, plan.pipeline.vpp):
        way = changed(plan, "pipeline", vpp=vpp)
        if ("layout", "stages") not in place.pinned:
            way = changed(way, "layout", stages=())
        yield way
    if plan.layout.stages:
        yield changed(plan, "layout", stages=())
    plain = changed(plan, "layout", stages=())
    if plan.pipeline.vpp > 1 and ("pipeline", "vpp") in place.pinned:
        yield changed(plain, "pipeline", schedule="interleaved")
    yield changed(plain, "pipeline", schedule="1f1b", vpp=1)
    for way in _microbatch(plain, place):
        yield changed(way, "pipeline", schedule="1f1b", vpp=1)


def _microbatch(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    sizes = [mb for mb in range(1, MOST_MICROBATCH + 1) if place.train.global_batch % mb == 0]
    for mb in _by_distance(sizes, plan.pipeline.microbatch):
        yield changed(plan, "pipeline", microbatch=mb)


def _experts(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
    counts = [mixture.experts for mixture in place.model.mixtures]
    if not counts:
        yield changed(plan, "experts", ep=1, etp=0)
        return
    for ep in _by_distance(divisors(min(counts)), plan.experts.ep):
        yield changed(plan, "experts", ep=ep)
        yield changed(plan, "experts", ep=ep, etp=0)
        yield changed(plan, "experts", ep=ep, etp=1)
    yield changed(plan, "layout", sp=True)


def _by_distance(values: object, now: int) -> list[int]:
    """Values other than `now`, the nearest ratio first, of equally near ones the smaller."""
    return sorted((v for v in values if v != now), key=lambda v: (abs(log2(v / max(now, 1))), v))  # type: ignore[attr-defined]


def _one(facet: str, **values: object) -> Callable[[Plan, RepairPlace], Iterator[Plan]]:
    def mend(plan: Plan, place: RepairPlace) -> Iterator[Plan]:
        yield changed(plan, facet, **values)

    return mend


_even = _one("layout", shares=())
#: Code of a violation -> what may mend it. Codes of schedules (S) are mended as a pipeline is.
_MENDING: dict[str, tuple[Callable[[Plan, RepairPlace], Iterator[Plan]], ...]] = {
    "P010": (_axes,),
    "P011": (_tensor, _axes),
    "P012": (_one("layout", sp=False), _tensor),
    "P013": (_pipeline, _axes),
    "P014": (_microbatch, _axes),
    "P015": (_context, _axes),
    "P016": (_one("memory", attention="flash"),),
    "P017": (_experts,),
    "P018": (_experts, _axes),
    "P019": (_one("layout", shard=0), _one("layout", scopes=()), _one("layout", hpz=0)),
    "P020": (_one("layout", zero=1), _one("pipeline", schedule="1f1b", vpp=1)),
    "P021": (_one("memory", layers=0),),
    "P022": (_one("precision", params="bf16", grads="fp32", moments="fp32"),),
    "P023": (_one("layout", order=DEFAULT_ORDER),),
    "P024": (_microbatch, _axes),
    "P025": (_even,),
    "P026": (_even, _one("layout", zero=1)),
    "P061": (_one("layout", scopes=()), _one("layout", hpz=0)),
}
