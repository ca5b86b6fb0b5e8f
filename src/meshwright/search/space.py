"""The space of plans as data: every facet of a plan with its domain, and what makes values go together.

A plan is a point in four parts, because they are nearly independent and that is what makes the space searchable:
the *core* (sizes of the axes, microbatch) decides which of the others are legal; the *inner* part (order of the axes,
recompute, kernels, precision) what a layer costs; the *piped* part (schedule, chunks, layers per stage) how
microbatches go through; the *state* part (ZeRO and its scope) what is exchanged around them. Values that would write
the same plan twice (sequence parallelism without tensor parallelism, ZeRO-2 with one stage a rank) appear once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product
from typing import Any, NamedTuple

import msgspec

from meshwright import schedules
from meshwright.plan import Experts, Layout, Memory, Overlap, Pipeline, Plan, Precision, Sequence, check
from meshwright.plan.facets import CP_ALGORITHMS, DEFAULT_ORDER
from meshwright.plan.slices import kinds, meet_inside
from meshwright.search.parts import Inners
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

EVEN, BALANCED = "even", "balanced"
#: Tokens of a sequence that a context-parallel rank holds at least, in the default space.
LEAST_TOKENS = 512
#: Sequences of a microbatch at most, in the default space.
MOST_MICROBATCH = 32
#: Recompute by operators is a policy of few frameworks and the executor has none of it: allowed, not the default.
USUAL_RECOMPUTE = ("none", "selective", "full")
#: Ordered anew for the times of every plan, so that no plan says much about another: allowed, not the default.
SEARCHED = ("zb-auto", "zb-1p", "zb-2p")


class Core(NamedTuple):
    """Sizes of the axes; ``devices`` are their product, the devices of the cluster."""

    devices: int
    tp: int
    cp: int
    pp: int
    dp: int
    mb: int
    ep: int
    etp: int


class Inner(NamedTuple):
    """What decides the cost of a layer besides the sizes; and ``shares`` of the batch, which go with the order: even,
    balanced, or microbatches of each kind of slice."""

    order: tuple[str, ...]
    sp: bool
    algorithm: str
    recompute: str
    recompute_layers: int
    attention: str
    dtype: str
    grads: str
    master: str
    moments: str
    overlap: tuple[str, ...]
    imbalance: float
    loss: str
    shares: str | tuple[int, ...] = EVEN


class Piped(NamedTuple):
    """How microbatches go through the stages; ``stages`` is even, balanced, or layers per stage."""

    schedule: str
    vpp: int
    stages: str | tuple[int, ...]


class State(NamedTuple):
    """What is sharded over data parallelism, and over how many ranks (0: all of them)."""

    zero: int
    shard: int


#: The simplest schedule and nothing sharded, for what depends on neither.
PLAIN, WHOLE, SHARDED = Piped("1f1b", 1, EVEN), State(0, 0), State(1, 0)
CORE, INNER, PIPED, STATE = Core._fields, Inner._fields, Piped._fields, State._fields
#: Facet -> what it is, in the order they are shown.
FACETS: dict[str, str] = {
    "devices": "ranks of the plan: the devices of the cluster",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "dp": "data parallelism: what the others leave of the devices",
    "mb": "sequences per microbatch",
    "ep": "expert parallelism",
    "etp": "ranks that split each expert",
    "order": "the axes on the cluster, innermost first",
    "sp": "sequence parallelism beside tensor parallelism",
    "algorithm": "how context parallelism exchanges",
    "recompute": "what the backward computes again",
    "recompute_layers": "layers of a chunk that do (0: all)",
    "attention": "attention kernels",
    "dtype": "precision of the matrix products",
    "grads": "stored gradients",
    "master": "master copy of the parameters",
    "moments": "stored optimizer moments",
    "overlap": "communication beside compute",
    "imbalance": "load of the busiest expert rank over the mean",
    "loss": "loss kernels",
    "shares": "microbatches of each kind of slice on unequal islands: even, balanced by search/shares.py, or numbers",
    "schedule": "pipeline schedule",
    "vpp": "chunks per pipeline rank",
    "stages": "layers per stage: even, balanced by the partition of search/partition.py, or numbers",
    "zero": "what is sharded over data parallelism",
    "shard": "ranks it is sharded over (0: all)",
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


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def default(model: Model, cluster: Cluster, train: Train) -> Space:
    """Everything exact: all layouts that use every device, all orders, all schedules, all recompute modes, all ZeRO
    scopes that end at a level of the cluster. Nothing that changes the numbers a training run computes with
    (precision, master copies) and nothing that is measured rather than chosen (overlap, kernels, imbalance)."""
    devices, usual = cluster.num_devices, Plan()
    domain = cluster.islands[0].domain_size
    mixtures = model.mixtures
    sizes = divisors(devices)
    return Space(
        domains={
            "devices": (devices,),
            "tp": tuple(n for n in sizes if domain % n == 0 or n % domain == 0),
            "cp": tuple(n for n in sizes if n == 1 or train.seq_len // n >= LEAST_TOKENS),
            "pp": tuple(n for n in sizes if n <= model.num_layers),
            "dp": None,
            "mb": tuple(n for n in divisors(train.global_batch) if n <= MOST_MICROBATCH),
            "ep": tuple(n for n in sizes if mixtures and all(m.experts % n == 0 for m in mixtures)) or (1,),
            "etp": (1, 0) if mixtures else (0,),
            "order": tuple(permutations(DEFAULT_ORDER)),
            "sp": (True, False),
            "algorithm": CP_ALGORITHMS,
            "recompute": USUAL_RECOMPUTE,
            "recompute_layers": (0,),
            "attention": (usual.memory.attention,),
            "dtype": (usual.precision.compute,),
            "grads": (usual.precision.grads,),
            "master": (usual.precision.master,),
            "moments": (usual.precision.moments,),
            "overlap": (("dp", "pp"),),
            "imbalance": (usual.experts.imbalance,),
            "loss": (usual.memory.loss,),
            "shares": (EVEN,) if len(cluster.islands) == 1 else (EVEN, BALANCED),
            "schedule": tuple(n for n in schedules.families() if n not in SEARCHED),
            "vpp": None,
            "stages": (EVEN,) if len(cluster.islands) == 1 else (EVEN, BALANCED),
            "zero": (0, 1, 2, 3),
            "shard": None,
        }
    )


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
            core = Core(devices, tp, cp, pp, dp, mb, ep, etp)
            if any(legal_inner(space, core, model, cluster, train)):
                yield core


def bare(core: Core, sp: bool, algorithm: str, attention: str) -> Plan:
    """A core's plan with the simplest of everything else."""
    return Plan(
        layout=Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, sp=sp),
        pipeline=Pipeline(schedule="gpipe", microbatch=core.mb),
        sequence=Sequence(algorithm=algorithm),
        experts=Experts(ep=core.ep, etp=core.etp),
        memory=Memory(attention=attention),
    )


def legal_inner(space: Space, core: Core, model: Model, cluster: Cluster, train: Train) -> Iterator[tuple]:
    """The (sp, algorithm, attention) that go with a core."""
    shards = [s for s in space["sp"] if core.tp > 1 or s] or [space["sp"][0]]
    ways = space["algorithm"] if core.cp > 1 else space["algorithm"][:1]
    for sp, algorithm, attention in product(shards, ways, space["attention"]):
        if not check(bare(core, sp, algorithm, attention), model, cluster, train):
            yield sp, algorithm, attention


def inners(space: Space, core: Core, model: Model, cluster: Cluster, train: Train) -> Inners:
    """Every inner part of a core's plans."""
    recompute = tuple(
        (mode, layers) for mode, layers in product(space["recompute"], space["recompute_layers"]) if _says(mode, layers)
    )
    rest = tuple(space[f] for f in ("dtype", "grads", "master", "moments", "overlap", "imbalance", "loss"))
    ways = tuple(legal_inner(space, core, model, cluster, train))
    orders = _orders(space, core)
    shared = {order: _shares(space, core, order, cluster, train.global_batch) for order in orders}
    found = _combined(ways, tuple(orders), recompute, rest)
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
def _combined(ways: tuple, orders: tuple, recompute: tuple, rest: tuple) -> Inners:
    """Every combination; many cores allow the same ones."""
    return Inners(
        Inner(order, sp, algorithm, mode, layers, attention, *others)
        for sp, algorithm, attention in ways
        for order in orders
        for mode, layers in recompute
        for others in product(*rest)
    )


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
    return _pipelines(space["schedule"], space["vpp"], space["stages"], core.pp, count, model.num_layers)


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
                out.append(Piped(name, vpp, stages))
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
        out += [State(zero, shard) for shard in _scopes(space, core, cluster, zero, replicas)]
    return tuple(out)


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
    return Plan(
        layout=Layout(
            tp=core.tp,
            pp=core.pp,
            dp=core.dp,
            cp=core.cp,
            sp=inner.sp,
            zero=state.zero,
            shard=state.shard,
            order=inner.order,
            stages=piped.stages if isinstance(piped.stages, tuple) else (),
            shares=inner.shares if isinstance(inner.shares, tuple) else (),
        ),
        pipeline=Pipeline(schedule=piped.schedule, vpp=piped.vpp, microbatch=core.mb),
        sequence=Sequence(algorithm=inner.algorithm),
        experts=Experts(ep=core.ep, etp=core.etp, imbalance=inner.imbalance),
        memory=Memory(
            recompute=inner.recompute, layers=inner.recompute_layers, attention=inner.attention, loss=inner.loss
        ),
        precision=Precision(compute=inner.dtype, grads=inner.grads, master=inner.master, moments=inner.moments),
        overlap=Overlap(**{name: name in inner.overlap for name in Overlap.__struct_fields__}),
    )
