"""Fragments: what ranks exchange of gradients and parameters, as one list for both executors.

``lower`` makes tasks of a fragment, ``run`` makes buckets of it. A fragment says of which parameters it is, how many
bytes, over which groups of the mesh, when it is due, in which code, how values are combined and what is done with the
result. Groups are named as ``run/mesh.py`` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.spec.workload import DTYPE_BYTES, STORED_BYTES
from meshwright.sync import ballots, divided, placed
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.combines import Combine, combine
from meshwright.sync.record import ADDED, NO_CODEC, Mix, Outer
from meshwright.work import HOST_REDUCE

if TYPE_CHECKING:
    from meshwright.plan import Layout, Plan
    from meshwright.schedules.actions import Actions
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train
    from meshwright.sync.record import SyncPolicy

#: What a fragment carries: gradients to their sum, sharded parameters to who computes with them, parameters or the
#: optimizer's moments to their mean over replicas, the square of the gradient's norm.
GRADIENTS, GATHERED, PARAMETERS, MOMENTS, NORM = "reduce", "gather", "parameters", "moments", "norm"
#: Sums of a step that are scattered on, to the ranks that update them, and updated weights that come back from these to
#: the ranks that compute with them, where the optimizer's states are sharded over more ranks than gradients or weights.
FOLDED, REFRESHED = "fold", "refresh"
#: The copy of weights that a forward has left behind among neighbours, made whole for its backward.
AGAIN = "again"
#: When a fragment is due: after every pass over its layers, after a round of passes (``due.rounds``), once a step, or
#: once in ``every`` steps.
PASS, ROUND, STEP, EVERY = "pass", "round", "step", "every"
#: Where what is exchanged lies as it is made, and as it is read.
PLACES = dict.fromkeys((GRADIENTS, FOLDED), (placed.TERMS, placed.STATE))
PLACES |= dict.fromkeys((GATHERED, REFRESHED, AGAIN), (placed.STATE, placed.WHOLE))
PLACES |= dict.fromkeys((PARAMETERS, MOMENTS), (placed.OWN, placed.STATE))
#: Kinds of parameters: replicated over all data-parallel ranks, over those of an expert, or the embedding's table where
#: the head uses it too. Where values are encoded by those beside them, the first are apart that all tensor-parallel
#: ranks hold alike (``whole``), or some of them do (``repeated``: key-value heads), so that their codes are alike too.
DENSE, EXPERT, TIED, WHOLE, REPEATED = "dense", "expert", "tied", "whole", "repeated"
#: Parameters of one dimension, where a rule exchanges them apart, and the head's, where every replica has its own.
VECTOR, HEADED = "vector", "headed"


#: What is made of gradients in place of their sum: Lion's updates, of whose signs the copies keep a ballot; the sign of
#: what gathers; what they differ from those at a point at which all know the sum.
LION, SIGN, REFERENCE = "lion", "sign", "reference"
#: What the heads of a replica predict of public text, which goes to those who learn it.
PREDICTIONS = "predictions"
#: Slopes of the loss along directions, a byte each; what takes them, in place of an optimizer with gradients.
SLOPES, PROJECTED = "slopes", "projected"


class Among(NamedTuple):
    """A group of ranks by its name in the mesh, and its size."""

    name: str
    size: int


SELF = Among("self", 1)


class Stored(NamedTuple):
    """Bytes of one value: of a gradient, of a parameter that is computed with, of the copy that is updated, and of each
    of the optimizer's moments, which are so many."""

    grads: int
    weights: int
    masters: int
    moments: int
    num_moments: int


class Weights(NamedTuple):
    """Parameters that are exchanged alike: those of one kind in one segment of a stage. ``held`` elements of them on a
    rank before any sharding, of which ``trained`` have gradients; ``twin``: the other rank of the pipeline that holds
    the same; ``tensors``: the shapes of the trained ones, for a code that goes by them."""

    stage: int
    segment: int
    kind: str
    held: float
    trained: float
    twin: Among = SELF
    tensors: tuple[Tensor, ...] = ()


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange. ``units`` are (stage, segment), ``kind`` which of their parameters; ``num_elements`` of them lie on
    a rank before sharding, ``element_bytes`` each.

    ``shard`` holds one copy together, ``replica`` are its copies, ``twin`` is summed over first. ``due`` is a pass, a
    round, a step, or ``every`` so many steps, the ``part`` of the layers that is due together; the result is applied
    ``lag`` steps later by the ``outer`` step, None where it is taken as it is. ``mix``: how it is taken from some of
    the copies, None from all. ``codec`` is that between copies, ``within`` that inside a shard's group. ``combine`` is
    the sum, the mean, what all hold ``joined``, or a way of ``sync/combines`` that needs the values of all; ``apply``
    says who takes it: the optimizer, the passes, the parameters, or clipping. ``beside``: it runs beside the
    computation, where that goes on. ``tensors``: the shapes of the values in their order (vectors may be left out),
    where they are not sharded and the code goes by them. ``update``: what is made of gradients, each copy's own, in
    place of their sum: signs of Lion's updates that are counted, the sign of the sum, or differences to those at a
    reference point. ``served``: its copies are clients, and exchange it with a server. ``padding``: how much larger the
    largest shard is than the mean, as which all travel. ``sums``: the part of the sum that each copy makes, where they
    are not alike. ``hosted``: the sum is made in the memory of hosts.
    """

    what: str
    units: tuple[int, int]
    kind: str
    num_elements: float
    element_bytes: int
    shard: Among = SELF
    replica: Among = SELF
    twin: Among = SELF
    due: str = STEP
    every: float = 1
    part: int = 0
    lag: int = 0
    outer: Outer | None = None
    mix: Mix | None = None
    codec: str = NO_CODEC
    within: str = NO_CODEC
    combine: str = "sum"
    apply: str = "optimizer"
    beside: bool = False
    tensors: tuple[Tensor, ...] = ()
    update: str = ""
    served: bool = False
    padding: float = 1.0
    sums: tuple[int, ...] = ()
    helpers: int = 0
    hosted: bool = False

    @property
    def num_bytes(self) -> float:
        """Bytes of the values on a rank before sharding, as they are stored."""
        return self.num_elements * self.element_bytes

    @property
    def plain(self) -> bool:
        """Whether the values travel as they are, and are added on their way."""
        whole = self.mix is None and self.update != REFERENCE
        return self.codec == NO_CODEC and self.combine in ADDED and whole

    @property
    def collected(self) -> bool:
        """Whether every copy gets what every other has, and combines it."""
        code = codec(self.codec)
        return self.update != LION and (self.combine not in ADDED or not (code.summed or code.ring))


#: The operations of messages to some of a group, or of other sizes to each, and of one to the next of all at a time.
NEIGHBOURS, HOPS = "neighbours", "hops"


class OnWire(NamedTuple):
    """A collective of an exchange: its operation, bytes (of all ranks' shares together for a gather, of what a rank
    brings for a reduction; one message to a neighbour) and group. ``divided``: the parts of a sum that the
    messages carry, where they are of these."""

    op: str
    num_bytes: float
    among: Among


class DividedOnWire(NamedTuple):
    """The messages of a divided sum, as a collective of an exchange: shares of `num_bytes` that the parts say."""

    op: str
    num_bytes: float
    among: Among
    parts: divided.SumMessages


def stored(plan: Plan, train: Train) -> Stored:
    """Bytes of the values of a plan, as it stores and computes."""
    precision, compute = plan.precision, plan.precision.compute or train.dtype
    whole = compute == "fp32"
    weights = 4 if whole else 2
    if precision.params == "fp8":
        weights = min(weights, max(1, int(DTYPE_BYTES[compute])))
    master = 4 if whole else int(STORED_BYTES[precision.master]) or 2
    return Stored(
        grads=int(STORED_BYTES[precision.grads]),
        weights=weights,
        masters=master,
        moments=int(STORED_BYTES[precision.moments]),
        num_moments=train.moments,
    )


def fragments(
    plan: Plan,
    model: Model,
    actions: Actions,
    sizes: Mapping[tuple[int, int], Mapping[str, tuple[float, float]]],
    stored: Stored,
    policy: SyncPolicy,
    tensors: Mapping[tuple[tuple[int, int], str], tuple[Tensor, ...]] | None = None,
) -> tuple[Fragment, ...]:
    """Every exchange of a step or a round. `sizes`: (stage, segment) -> kind -> elements a rank holds and trains;
    `tensors`: their shapes, for a code that goes by them."""
    out: list[Fragment] = []
    for (stage, segment), kinds in sizes.items():
        for kind, (held, trained) in kinds.items():
            twin = twin_of(model, actions, stage, kind)
            shapes = (tensors or {}).get(((stage, segment), kind), ())
            some = Weights(stage, segment, kind, held, trained, twin, shapes)
            out += policy.rule.fragments(plan, policy, some, stored)
    return (*out, norm(plan, policy))


def twin_of(model: Model, actions: Actions, stage: int, kind: str) -> Among:
    """The two ranks of a pipeline that hold the same parameters: a stage that is run in both directions, and a tied
    table whose embedding and head are on different ranks."""
    if kind == TIED and ends_apart(actions):
        return Among("ends", 2)
    return Among("mirror", 2) if len(actions.stage_ranks[stage]) == 2 else SELF


def ends_apart(actions: Actions) -> bool:
    """Whether no rank holds the first and the last stage."""
    return not set(actions.stage_ranks[0]) & set(actions.stage_ranks[-1])


def gradients_due(layout: Layout) -> str:
    """When gradients are exchanged under a layout: after every pass or every round where they are kept sharded, else
    once a step."""
    if not layout.shards_gradients:
        return STEP
    return PASS if layout.pp == 1 else ROUND


def final_due(layout: Layout) -> str:
    """When what exchanges gradients is told that a pass is the last before it does: where sums have a scope of their
    own, the last of a step."""
    return STEP if layout.scopes else gradients_due(layout)


def gradients(plan: Plan, weights: Weights, stored: Stored) -> Fragment:
    """The gradients of some parameters, summed over the ranks that step together."""
    shard, replica = across(plan, weights.kind)
    return Fragment(
        what=GRADIENTS,
        units=weights[:2],
        kind=weights.kind,
        num_elements=weights.trained,
        element_bytes=stored.grads,
        shard=shard,
        replica=replica,
        twin=weights.twin,
        due=gradients_due(plan.layout) if shard.size > 1 else STEP,
        beside=plan.overlap.dp and weights.kind != TIED and weights.twin == SELF,
        tensors=weights.tensors if shard.size == 1 else (),
    )


def as_it_is(f: Fragment) -> Fragment:
    """A fragment whose gradients travel in no code."""
    return msgspec.structs.replace(f, codec=NO_CODEC) if f.what == GRADIENTS else f


def gathered(plan: Plan, weights: Weights, stored: Stored) -> Fragment:
    """Sharded parameters, made whole for the passes that compute with them; ZeRO-1 and 2 shard those that are trained
    alone."""
    layout = plan.layout
    return Fragment(
        what=GATHERED,
        units=weights[:2],
        kind=weights.kind,
        num_elements=weights.held if layout.zero == 3 else weights.trained,
        element_bytes=stored.weights,
        shard=across(plan, weights.kind)[0],
        due=PASS if layout.gathers_again else STEP,
        combine="joined",
        apply="passes",
        beside=plan.overlap.dp if layout.gathers_again else plan.overlap.gathers_ahead,
    )


def norm(plan: Plan, policy: SyncPolicy) -> Fragment:
    """The square of the gradient's norm, a number that all ranks of a step wait for."""
    layout = plan.layout
    ranks = layout.tp * layout.pp * policy.rule.together(plan)
    everyone = Among("worker", ranks)
    return Fragment(what=NORM, units=(-1, -1), kind="", num_elements=1, element_bytes=4, replica=everyone, apply="clip")


def slopes(plan: Plan) -> Fragment:
    """The slope that every replica has measured, a byte, which all get."""
    replicas = plan.layout.dp * plan.layout.cp
    among = Among("data", replicas)
    return Fragment(
        what=GATHERED, units=(-1, -1), kind="", num_elements=replicas, element_bytes=1, shard=among, apply=PROJECTED
    )


def predictions(plan: Plan, policy: SyncPolicy, num_bytes: int) -> Fragment:
    """The predictions of a replica of public text, so many bytes, which its neighbours on the graph get."""
    among = Among("dp", plan.layout.dp)
    return Fragment(
        what=PREDICTIONS,
        units=(-1, -1),
        kind="",
        num_elements=num_bytes,
        element_bytes=1,
        replica=among,
        mix=Mix(graph=policy.group),
        apply="passes",
    )


def norms(plan: Plan, policy: SyncPolicy, num_matrices: int) -> Fragment:
    """The squares of the norms of every matrix and of its update, two numbers each, that a layer-wise optimizer's ranks
    wait for."""
    return msgspec.structs.replace(norm(plan, policy), num_elements=2 * num_matrices, element_bytes=8)


def across(plan: Plan, kind: str) -> tuple[Among, Among]:
    """The groups of a kind of parameters when all replicas step together: that which shards one copy, and that of the
    copies."""
    layout = plan.layout
    if kind == EXPERT:
        if not layout.zero:
            return SELF, Among("edp", plan.edp)
        scope = expert_scope(plan)
        return Among("expert_shard", scope), Among("expert_replica", plan.edp // scope)
    data = layout.dp * layout.cp
    if not layout.zero:
        return SELF, Among("data", data)
    return Among("shard", layout.shard_group), Among("replica", data // layout.shard_group)


def expert_scope(plan: Plan) -> int:
    """Ranks over which an expert's state is sharded: as many as the others', where so many have the expert."""
    scope = min(plan.edp, plan.layout.shard_group)
    return plan.edp if plan.edp % scope else scope


def on_wire(some: Iterable[Fragment]) -> list[OnWire | DividedOnWire]:
    """The collectives of fragments that are due together, one after the other: within shards first, then over their
    copies."""
    inside: list[OnWire | DividedOnWire] = []
    outside: list[OnWire | DividedOnWire] = []
    for f in some:
        if f.within != NO_CODEC and f.shard.size > 1:
            op = "all_gather" if f.what == GATHERED else "all_to_all"
            inside.append(OnWire(op, shard_bytes(f) * f.shard.size, f.shard))
            outside += _between(f) if f.what != GATHERED else []
            continue
        way = moved(f)
        if way.within:
            inside.append(OnWire(way.within, f.num_bytes * f.padding, f.shard))
        if way.across:
            apart = f.shard.size > 1 or f.what in (PARAMETERS, MOMENTS)
            (outside if apart else inside).extend(_between(f))
    return [one for one in (*inside, *outside) if one.among.size > 1 and one.num_bytes > 0]


def moved(f: Fragment) -> placed.StateMoves:
    """The collectives by which a fragment comes from where it is made to where it is read; a sum, where nothing else is
    said of it."""
    return placed.moves(*PLACES.get(f.what, (placed.TERMS, placed.STATE)))


def buckets(op: str, num_bytes: float, bucket_bytes: float) -> int:
    """Messages that a collective is cut into: sums go in buckets of at most `bucket_bytes` (0: whole), as DDP's."""
    return ceil(num_bytes / bucket_bytes) if bucket_bytes and op in ("all_reduce", HOST_REDUCE) else 1


def _between(f: Fragment) -> list[OnWire | DividedOnWire]:
    """The messages of a shard between its copies: added on their way where the code can be, else gathered by all."""
    code = codec(f.codec)
    if f.update == LION:
        sent, back = ballots.messages(coded_length(f), f.replica.size, f.combine)
        return [OnWire("all_to_all", sent, f.replica), OnWire("all_gather", back, f.replica)]
    if f.mix is not None:
        return [OnWire(NEIGHBOURS, wire, f.replica) for wire in code.messages(coded_length(f), f.element_bytes)]
    if f.sums:
        return [
            DividedOnWire(NEIGHBOURS, size, f.replica, parts)
            for size, parts in divided.rounds(f.num_bytes, f.sums, f.helpers)
        ]
    if f.hosted:
        return [OnWire(HOST_REDUCE, f.num_bytes, f.replica)]
    if f.what in (GRADIENTS, FOLDED) and f.plain:
        return [OnWire(moved(f).across, f.num_bytes / f.shard.size, f.replica)]
    if f.served:  # the code from every client to the server, and the model as it is stored back
        sent = sum(code.messages(coded_length(f), f.element_bytes))
        return [OnWire("star", (sent + f.num_bytes) / 2, f.replica)]
    if code.ring:  # each copy's own part of the sum goes round once to be made, and once to be told
        part = code.wire_bytes(ceil(coded_length(f) / f.replica.size), f.element_bytes)
        return [OnWire(HOPS, part, f.replica)] * 2
    op, times = ("all_gather", f.replica.size) if f.collected else ("all_reduce", 1)
    sent = code.messages(coded_length(f), f.element_bytes, f.tensors)
    first = [OnWire("all_reduce", 8, f.replica)] if code.varies else []  # of how many bytes there are, the most
    return [*first, *(OnWire(op, wire * times, f.replica) for wire in sent)]


def encodes_apart(plan: Plan, policy: SyncPolicy) -> bool:
    """Whether parameters that tensor-parallel ranks hold alike are encoded apart from others: where a value's code
    depends on those beside it, and not on those of its own tensor alone."""
    code = codec(policy.codec)
    by_tensor = code.factors is not None and not plan.layout.zero
    return plan.layout.tp > 1 and not code.exact and not code.each and not by_tensor


def combining(f: Fragment) -> Combine:
    """Return the way in which what all copies bring is made one."""
    return combine(f.combine)


def shard_bytes(f: Fragment) -> int:
    """Return the bytes of the code of a shard: of all it holds in a row, or, where the shapes are given, of its rows of
    each tensor."""
    wire, eb, ways = codec(f.within).wire_bytes, f.element_bytes, f.shard.size
    if not f.tensors:
        return wire(coded_length(f), eb)
    return sum(wire(ceil(one.rows / ways) * one.columns * one.times, eb) for one in f.tensors)


def coded_length(f: Fragment) -> int:
    """Return how many values a rank encodes of a fragment: those of the longest shard."""
    return ceil(f.num_elements / f.shard.size)


def by_units(some: Iterable[Fragment]) -> dict[Any, dict[str, Fragment]]:
    """Fragments of the same parameters together: (units, kind) -> what -> fragment."""
    out: dict[Any, dict[str, Fragment]] = {}
    for f in some:
        out.setdefault((f.units, f.kind), {})[f.what] = f
    return out
