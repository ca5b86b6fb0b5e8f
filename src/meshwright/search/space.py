"""The space of plans as data: every facet of a plan with its domain, and what makes values go together.

A plan is a point in four parts, because they are nearly independent and that is what makes the space searchable:
the *core* (sizes of the axes, microbatch) decides which of the others are legal; the *inner* part (order of the axes,
recompute, kernels, precision) what a layer costs; the *piped* part (schedule, chunks, layers per stage) how
microbatches go through; the *state* part (ZeRO and its scope) what is exchanged around them. Values that would write
the same plan twice (sequence parallelism without tensor parallelism, ZeRO-2 with one stage a rank) appear once.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from typing import Any

import msgspec

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.plan import Layout, Plan, check
from meshwright.plan.facet import BALANCED, EVEN, Field
from meshwright.plan.facets import facets, fields
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.plan.facets.overlap import AS_DECIDED, inside, overlapped, usual_of
from meshwright.plan.facets.overlap import gathers_once as once
from meshwright.plan.facets.pipeline import BEFORE
from meshwright.plan.slices import kinds, meet_inside
from meshwright.search.parts import Inners
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL as EVERY_STEP

DEVICES = "devices"
#: Inner fields that go with others: orders with sizes, shares with orders, a number of layers with a mode, what
#: overlaps with the schedule.
_TOGETHER = ("order", "recompute", "recompute_layers", "overlap", "shares")


def _part(name: str, doc: str, first: tuple[str, ...] = ()) -> type:
    """The part of a point of the space as a named tuple of its fields, each with the plan's default."""
    mine = [field for field in fields().values() if field.part == name.lower()]
    part = namedtuple(
        name, (*first, *(f.name for f in mine)), defaults=(0,) * len(first) + tuple(f.usual for f in mine)
    )
    part.__annotations__ = dict.fromkeys(first, int) | {field.name: field.form.kind for field in mine}
    part.__doc__, part.__module__ = doc, __name__
    return part


Core = _part("Core", "Sizes of the axes; ``devices`` are their product, the devices of the cluster.", (DEVICES,))
Inner = _part("Inner", "Words that a layer's cost depends on besides sizes, and those that go with the axes' order.")
Piped = _part("Piped", "The schedule of microbatches; ``stages`` is even, balanced, or layers per stage.")
State = _part("State", "The state that is sharded over data parallelism, and over how many ranks (0: all of them).")
#: The simplest schedule and nothing sharded, for what depends on neither.
PLAIN, WHOLE, SHARDED = Piped(), State(), State(zero=1)
_ALL, _GPIPE = Inner(), Piped(schedule="gpipe")
#: Facet of the space -> what it is, part by part.
FACETS: dict[str, str] = {DEVICES: "ranks of the plan: the devices of the cluster"} | {
    name: fields()[name].help for part in (Core, Inner, Piped, State) for name in part._fields if name != DEVICES
}


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Facet -> its values. None: worked out from the other facets (``dp``, ``vpp``, ``shard``, the order of sizes)."""

    domains: dict[str, tuple[Any, ...] | None]

    def __getitem__(self, facet: str) -> tuple[Any, ...] | None:
        return self.domains[facet]

    def allows(self, facet: str, value: Any) -> bool:
        domain = self.domains[facet]
        return domain is None or value in domain

    def with_domain(self, facet: str, values: tuple[Any, ...] | None) -> Space:
        return Space(domains=self.domains | {facet: values})


def default(model: Model, cluster: Cluster, train: Train, gather: str = "ahead") -> Space:
    """Everything exact: all layouts that use every device, all orders, all schedules, all recompute modes, all ZeRO
    scopes that end at a level of the cluster. Nothing that changes the numbers a training run computes with
    (precision, master copies) and nothing that is measured rather than chosen (overlap, kernels, imbalance): each
    field of a plan says its values. `gather` is when the software gathers parameters that a step gathers once."""
    values = {name: field.values(model, cluster, train) for name, field in fields().items()} | {"gather": (gather,)}
    return Space(domains={DEVICES: (cluster.num_devices,)} | values)


def cores(space: Space, model: Model, cluster: Cluster, train: Train) -> Iterator[Core]:
    """Every legal core: its plan without a pipeline schedule, ZeRO or an order is legal."""
    mixture = bool(model.mixtures)
    for devices, tp, cp, pp in product(space["devices"], space["tp"], space["cp"], space["pp"]):
        if devices % (tp * cp * pp) or devices != cluster.num_devices:
            continue
        dp = devices // (tp * cp * pp)
        if not space.allows("dp", dp):
            continue
        for mb, ep, etp in product(space["mb"], space["ep"], space["etp"]):
            if train.global_batch % (dp * mb):
                continue
            if not mixture and (ep > 1 or etp > 1):
                continue
            if etp == tp and 0 in space["etp"]:
                continue  # 0 means as tp
            core = Core(devices=devices, tp=tp, cp=cp, pp=pp, dp=dp, mb=mb, ep=ep, etp=etp)
            if any(legal_inner(space, core, model, cluster, train)):
                yield core


def legal_inner(space: Space, core: Core, model: Model, cluster: Cluster, train: Train) -> Iterator[Inner]:
    """The inner parts that go with a core, before orders, recompute and shares are put to them: values that change
    nothing beside the others appear once."""
    sized, others = _ways(True), _ways(False)
    usual = all(space[f.name] == (f.usual,) for f in others)
    for way in _combinations(space, bare(core, _ALL), sized, _ALL):
        plan = bare(core, way)
        if check(plan, model, cluster, train):
            continue
        if usual:
            yield way
            continue
        for inner in _combinations(space, plan, others, way):
            said = bare(core, inner)
            if not any(d for rule in _rules() for d in rule(said, model, cluster, train)):
                yield inner


@cache
def _ways(with_sizes: bool) -> tuple[Field, ...]:
    """The inner fields that are combined as they come: those whose legality depends on the sizes, or the others."""
    return tuple(f for f in map(fields().get, Inner._fields) if f.name not in _TOGETHER and f.with_sizes == with_sizes)


@cache
def _rules() -> tuple:
    """The rules of the facets of such fields, sizes or not."""
    return tuple(rule for name in dict.fromkeys(f.facet for f in _ways(False)) for rule in facets()[name].rules)


def _combinations(space: Space, plan: Plan, chosen: tuple[Field, ...], start: Inner) -> list[Inner]:
    """The part `start` with all combinations of the values of some fields; where one changes nothing in `plan`, its
    default if that is among them, else the first."""
    found = [start._replace(**{f.name: space[f.name][0] for f in chosen})]
    for field in chosen:
        values = space[field.name]
        if len(values) > 1 and field.useful and not field.useful(plan):
            values = (field.usual if field.usual in values else values[0],)
        if values != space[field.name][:1]:
            found = [inner._replace(**{field.name: value}) for inner in found for value in values]
    return found


def bare(core: Core, inner: Inner) -> Plan:
    """The plan of a core and an inner part with the simplest of everything else."""
    return plan_of(core, inner, _GPIPE, WHOLE)


def inners(space: Space, core: Core, model: Model, cluster: Cluster, train: Train) -> Inners:
    """Every inner part of a core's plans."""
    recompute = tuple(
        (mode, layers) for mode, layers in product(space["recompute"], space["recompute_layers"]) if _says(mode, layers)
    )
    ways = tuple(legal_inner(space, core, model, cluster, train))
    orders = _orders(space, core)
    shared = {order: _shares(space, core, order, cluster, train.global_batch) for order in orders}
    overlaps = _overlaps(space, core)
    whole = tuple(o for o in overlaps if not any(map(inside, o)))
    each = tuple(
        (*whole, *_ways_inside(core, way, overlaps[len(whole) :], model, cluster, train))
        if len(whole) < len(overlaps)
        else overlaps
        for way in ways
    )
    found = _combined(ways, tuple(orders), recompute, each)
    if all(shares == [EVEN] for shares in shared.values()):
        return found
    return Inners(inner._replace(shares=shares) for inner in found for shares in shared[inner.order])


def _shares(
    space: Space, core: Core, order: tuple[str, ...], cluster: Cluster, global_batch: int
) -> list[str | tuple[int, ...]]:
    """Batch shares that mean something: several kinds of slices that exchange nothing in every microbatch, and numbers
    that add up to the batch."""
    layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=order)
    found = kinds(layout, cluster)
    apart = len(found) > 1 and meet_inside(layout, core.ep * (core.etp or core.tp), found)

    def whole(shares: tuple[int, ...]) -> bool:
        if len(shares) != len(found):
            return False
        return core.mb * sum(len(kind.members) * share for kind, share in zip(found, shares)) == global_batch

    return [value for value in space["shares"] if value == EVEN or (apart and (value == BALANCED or whole(value)))]


@lru_cache(maxsize=256)
def _combined(ways: tuple[Inner, ...], orders: tuple, recompute: tuple, overlaps: tuple) -> Inners:
    """Every combination, of each way with its own `overlaps`; many cores allow the same ones."""
    groups = [
        [
            way._replace(order=(), recompute=mode, recompute_layers=layers, overlap=overlap)
            for mode, layers in recompute
            if way.recompute_portions == 1 or mode == "full"  # of layers that are recomputed whole alone
            for overlap in mine
        ]
        for way, mine in zip(ways, overlaps)
    ]
    return Inners.crossed(groups, orders)


def _ways_inside(
    core: Core, way: Inner, overlaps: tuple[tuple[str, ...], ...], model: Model, cluster: Cluster, train: Train
) -> tuple[tuple[str, ...], ...]:
    """Return the overlaps inside layers that go with a core and a way of computing them: parts that divide what they
    cut, and what the device can do."""
    rules = facets()["overlap"].rules

    def legal(overlap: tuple[str, ...]) -> bool:
        plan = bare(core, way._replace(overlap=overlap))
        return not any(True for rule in rules for _ in rule(plan, model, cluster, train))

    return tuple(filter(legal, overlaps))


def _overlaps(space: Space, core: Core) -> tuple[tuple[str, ...], ...]:
    """Return the overlaps of a core's plans. Where the schedules of the space decide it differently, each of their ways
    has the mark that it goes with some of them (:func:`meshwright.search.legal.as_decided`)."""
    said = [value for value in space["overlap"] if AS_DECIDED not in value]
    if len(said) < len(space["overlap"]):
        names = space["schedule"] if core.pp > 1 else (PLAIN.schedule,)
        decided = dict.fromkeys(overlapped(usual_of(core.ep, name)) for name in names)
        said += [(*value, AS_DECIDED) if len(decided) > 1 else value for value in decided if value not in said]
    return tuple(sorted(said, key=lambda value: any(map(inside, value))))  # those inside layers last


def _says(mode: str, layers: int) -> bool:
    return mode != "none" or layers == 0


def _orders(space: Space, core: Core) -> list[tuple[str, ...]]:
    """Orders that place the axes differently: an axis of size 1 has no place."""
    found: dict[tuple, tuple[str, ...]] = {}
    usual = [DEFAULT_ORDER] if DEFAULT_ORDER in space["order"] else []
    for order in (*usual, *space["order"]):
        if core.ep > 1 and core.pp > 1 and order[-1] != "pp":
            continue
        found.setdefault(tuple(axis for axis in order if getattr(core, axis) > 1), order)
    return list(found.values())


def pipelines(space: Space, core: Core, model: Model, train: Train) -> tuple[Piped, ...]:
    """Every schedule of a core's plans, with its chunks and stages."""
    count = train.global_batch // (core.dp * core.mb)
    found = _pipelines(space["schedule"], space["vpp"], space["stages"], core.pp, count, model.num_layers)
    whole = _with_others(space, found, "schedule", "vpp", "stages")
    if {*space["filling"]} == {""}:
        return whole
    # frozen layers are run before a step, or in the waits of a pipeline that begins at one end
    return tuple(
        part
        for part in whole
        if (core.pp > 1 or part.filling == BEFORE) and schedules.get(part.schedule).placement != "bidirectional"
    )


def _with_others(space: Space, found: tuple, *known: str) -> tuple:
    """Parts with all combinations of the values of the fields that are not known yet."""
    for name in found[0]._fields if found else ():
        if name not in known:
            found = tuple(part._replace(**{name: value}) for part in found for value in space[name])
    return found


@lru_cache(maxsize=1024)
def _pipelines(
    names: tuple[str, ...], chunks: tuple[int, ...] | None, dealt: tuple, pp: int, count: int, num_layers: int
) -> tuple[Piped, ...]:
    """Many cores have the same ones: as many ranks and microbatches."""
    if pp == 1:
        plain = "1f1b" if "1f1b" in names else names[0]
        names = (plain,)
    out = []
    for name in names:
        family = schedules.get(name)
        for vpp in _chunks(chunks, pp, num_layers, family):
            if pp * vpp > num_layers or family.legality(pp, count, vpp):
                continue
            for stages in dealt:
                if isinstance(stages, tuple) and (len(stages) != pp * vpp or sum(stages) != num_layers):
                    continue
                if stages == BALANCED and pp == 1:
                    continue
                out.append(Piped(schedule=name, vpp=vpp, stages=stages))
    return tuple(out)


def _chunks(chunks: tuple[int, ...] | None, pp: int, num_layers: int, family) -> list[int]:
    """Chunks per rank: the family's own, or every number that gives another number of layers per chunk."""
    if pp == 1:
        return [1] if chunks is None or 1 in chunks else []
    legal = family.vpps
    if not legal:
        per_rank = -(-num_layers // pp)
        legal = sorted({-(-per_rank // layers) for layers in range(1, per_rank)} - {1})
        legal = [v + v % 2 for v in legal] if family.placement == "wave" else legal
    return [v for v in (dict.fromkeys(legal) if chunks is None else chunks) if not family.vpps or v in legal]


def states(space: Space, core: Core, cluster: Cluster, train: Train) -> tuple[State, ...]:
    """Every ZeRO stage and scope of a core's plans."""
    replicas = core.dp * core.cp
    out = []
    for zero in space["zero"]:
        if replicas == 1 and zero and 0 in space["zero"]:
            continue
        if zero == 3 and core.pp > 1 and 1 in space["zero"] and gathers_once(space, train):
            continue
        out += [State(zero=zero, shard=shard) for shard in _scopes(space, core, cluster, zero, replicas)]
    crossed = _with_others(space, tuple(out), "zero", "shard")
    found = tuple(dict.fromkeys(s if once(s.zero, core.pp) else s._replace(gather="ahead") for s in crossed))
    chosen = [one for one in {state.sync for state in found} if read(one).undecided or read(one).layers is not None]
    if chosen and not read(chosen[0]).coded:
        raise MeshwrightError.one(
            "Y003",
            f"sync={chosen[0]} leaves open {read(chosen[0]).rule.opens[0]}, which differs from plan to plan",
            place=f"--fix sync={chosen[0]}",
            help="search with sync=step, then ask meshwright predict for what it finds with this sync",
        )
    if chosen:
        raise MeshwrightError.one(
            "Y003",
            f"sync={chosen[0]} encodes other layers under every plan, and a search bounds all layers alike",
            place=f"--fix sync={chosen[0]}",
            help="search with the codec for all layers, then ask meshwright predict for the layers under what it finds",
        )
    return tuple(
        state
        for state in found
        if _kept_together(core, state, cluster) and _held(space, core, state, cluster) and _nested(core, state)
    )


def _kept_together(core: Core, state: State, cluster: Cluster) -> bool:
    """Whether the rule of synchronisation goes with the sizes and what is sharded."""
    if state.sync == EVERY_STEP:
        return True
    said = read(state.sync)
    wrong = said.rule.wrong
    return wrong is None or not any(wrong(plan_of(core, _ALL, PLAIN, state), cluster, said))


def _nested(core: Core, state: State) -> bool:
    """Whether scopes of weights and gradients, or of a second copy, lie in one another and in the one of all state."""
    whole = state.shard or core.dp * core.cp
    if state.hpz:
        alone = state.zero == 3 and core.pp == 1 and state.scopes == EVEN and state.hold == EVEN
        return alone and 1 < state.hpz < whole and whole % state.hpz == 0
    if state.scopes == EVEN:
        return True
    if state.zero < 3 or core.pp > 1 or len(state.scopes) != 2 or state.hold != EVEN:
        return False
    weights, gradients = state.scopes
    return weights > 1 and gradients % weights == 0 and whole % gradients == 0


def _held(space: Space, core: Core, state: State, cluster: Cluster) -> bool:
    """Whether shards of unequal size go with what is sharded over how many ranks, and with the kinds of slices."""
    if state.hold == EVEN:
        return True
    if not state.zero or state.shard or core.dp * core.cp == 1 or state.sync != EVERY_STEP:
        return False
    sizes = {"tp": core.tp, "cp": core.cp, "pp": core.pp, "dp": core.dp}
    counts = {len(kinds(Layout(order=order, **sizes), cluster)) for order in _orders(space, core)}
    return max(counts) > 1 if state.hold == BALANCED else counts == {len(state.hold)}


def gathers_once(space: Space, train: Train) -> bool:
    """Whether ZeRO-3 under a pipeline is ZeRO-1 in other words. Parameters are gathered before the first forward and
    stay until the step ends, so both hold a working copy and a sharded master, and exchange the same bytes: where the
    two copies differ, all parameters are trained, and gathering runs beside the first forward."""
    computes = {dtype or train.dtype for dtype in space["dtype"]}
    overlapped = all("dp" in overlap for overlap in space["overlap"])
    return computes <= {"bf16", "fp16"} and "none" not in space["master"] and train.lora is None and overlapped


def _scopes(space: Space, core: Core, cluster: Cluster, zero: int, replicas: int) -> list[int]:
    """0 for all replicas; smaller groups that, placed inside, fill a level of the cluster."""
    if not zero:
        return [0] if space.allows("shard", 0) else []
    if space["shard"] is not None:
        return [s for s in space["shard"] if s < replicas and replicas % max(s, 1) == 0]
    inside, scopes = 1, [0]
    for level in cluster.islands[0].levels:
        inside *= level.arity
        shard = inside // core.tp
        if inside % core.tp == 0 and 1 < shard < replicas and replicas % shard == 0:
            scopes.append(shard)
    return scopes


def plan_of(core: Core, inner: Inner, piped: Piped, state: State) -> Plan:
    """The plan at a point; ``balanced`` stages are still to be worked out."""
    around, own = _around(core, piped, state), _around(inner)
    joined = {facet: record(**around[1][facet], **own[1][facet]) for facet, record in _joined()}
    return Plan(**around[0], **own[0], **joined)


@lru_cache(maxsize=1 << 14)
def _around(*parts: tuple) -> tuple[dict[str, msgspec.Struct], dict[str, dict[str, Any]]]:
    """Return what some parts of a point set in a plan: the records of the facets that the inner part does not touch,
    and the attributes of those that it does."""
    said: dict[str, dict[str, Any]] = {}
    for name, value in ((n, v) for part in parts for n, v in zip(part._fields, part) if n != DEVICES):
        said.setdefault(fields()[name].facet, {}).update(fields()[name].sets(value))
    joined = dict(_joined())
    whole = {facet: facets()[facet].record(**values) for facet, values in said.items() if facet not in joined}
    return whole, {facet: said.get(facet, {}) for facet in joined}


@cache
def _joined() -> tuple[tuple[str, type], ...]:
    """The facets that the inner part of a point says as well as others, with their records."""
    inner = {fields()[name].facet for name in Inner._fields}
    others = {fields()[name].facet for part in (Core, Piped, State) for name in part._fields if name != DEVICES}
    return tuple((facet, facets()[facet].record) for facet in facets() if facet in inner & others)


def point(plan: Plan) -> tuple[Core, Inner, Piped, State]:
    """The point of a plan with ``dp`` filled in, in whatever space has it."""
    values = {name: field.value(plan) for name, field in fields().items()} | {DEVICES: plan.layout.num_ranks}
    core, inner, piped, state = (part(*[values[n] for n in part._fields]) for part in (Core, Inner, Piped, State))
    return core, inner, piped, state
