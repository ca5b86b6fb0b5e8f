"""Passes 5 to 9: the step graph. Actions become compute tasks, then sends, data-parallel exchange, the optimizer
and memory are added, each by one function over arrays.

Nothing here knows how long anything takes: a cost key says what a task is (``Pass``, ``Send``, ``Exchange``,
``Update``), and ``simulate/price.py`` prices each distinct key once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.graph import KIND, GraphBuilder, TaskGraph
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.plan import Layout
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.work import Group

PASS_NAMES = {F: "F", B: "B", W: "W", BW: "BW"}


class Pass(msgspec.Struct, frozen=True, cache_hash=True):
    """One pass over some units on the ranks around ``start`` (device class ``device``); ``beside`` are the exchanges
    ("gather", "reduce") that run while it does, ``share`` the part of the stage's pass that this is."""

    which: str
    units: tuple[Unit, ...]
    device: str
    start: int
    beside: tuple[str, ...] = ()
    share: float = 1.0


class Send(msgspec.Struct, frozen=True, cache_hash=True):
    """Activations or their gradient from one stage to the next."""

    group: Group


class Exchange(msgspec.Struct, frozen=True, cache_hash=True):
    """Collectives over data-parallel groups, one after the other: (op, bytes, group) each."""

    steps: tuple[tuple[str, float, Group], ...]


class Update(msgspec.Struct, frozen=True, cache_hash=True):
    """The optimizer on this many parameters of a rank."""

    params: float
    device: str


Key = Pass | Send | Exchange | Update


class Tables:
    """The keys of a graph: each distinct one once, numbered as in the graph."""

    def __init__(self, builder: GraphBuilder):
        self._builder = builder
        self.keys: dict[Key, int] = {}

    def __call__(self, key: Key) -> int:
        found = self.keys.get(key)
        if found is None:
            found = self.keys[key] = self._builder.key(f"{describe(key)} #{len(self.keys)}")
        return found


class Compute(msgspec.Struct):
    """Where the compute tasks of one slice class are: ``first``/``last`` task of F and of the backward by (stage,
    microbatch), ``done`` the last task of each pipeline rank, and the expanded tasks."""

    forward: tuple[np.ndarray, np.ndarray]
    backward: tuple[np.ndarray, np.ndarray]
    home: np.ndarray
    task: np.ndarray
    action: np.ndarray
    segment: np.ndarray
    done: np.ndarray


def gathers_again(layout: Layout) -> bool:
    """Whether parameters are gathered for every microbatch: fully sharded ones without a pipeline. Under one they are
    gathered once a step and kept, as TorchTitan does, because every microbatch needs them (2410.06511)."""
    return layout.zero == 3 and layout.pp == 1 and layout.shard_group > 1


def reduced_after(actions: Actions, layout: Layout) -> np.ndarray:
    """The passes after which gradients are reduced, bool [actions]: the last of every (rank, stage); where gradients
    are sharded every pass without a pipeline, and under one the last of every round.

    A round is as many weight gradients of one stage as a rank computes without another stage between them: the stage's
    gradients accumulate whole for so long, then they are scattered and their memory is free for the next stage. Llama
    3 shards gradients under its pipeline (2407.21783, section 3.3.2); scattering them after rounds, of as many
    microbatches as an interleaved schedule gives a chunk at a time, is the least communication that does so. One stage
    a rank is one round a step, ZeRO-1 in other words.
    """
    grads = np.isin(actions.kind, (W, BW))
    if not layout.shards_gradients:
        return last_of(actions, grads)
    return grads if layout.pp == 1 else rounds(actions)[1]


def rounds(actions: Actions) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last pass of every round (see :func:`reduced_after`), bool [actions] each."""
    chosen = np.flatnonzero((actions.kind == W) | (actions.kind == BW))
    place = actions.rank_of()[chosen].astype(np.int64) * actions.num_stages + actions.stage[chosen]
    new = np.append(True, place[1:] != place[:-1])
    first, last = np.zeros(len(actions), bool), np.zeros(len(actions), bool)
    first[chosen[new]] = True
    last[chosen[np.append(new[1:], True)]] = True
    return first, last


def expansion(actions: Actions, stages: Stages) -> np.ndarray:
    """How many segments each action is cut into: layer by layer where a gather or a reduction runs beside it."""
    plan = stages.plan
    segments = np.array([len(c.segments) for c in stages.compositions])[actions.stage]
    one = np.ones(len(actions), np.int64)
    if plan.layout.dp * plan.layout.cp == 1:
        return one
    gathers = gathers_again(plan.layout)
    if not plan.overlap.dp:
        return segments if plan.layout.pp == 1 and plan.layout.shards_gradients else one
    forward = actions.kind == F
    cut = forward if gathers else forward & first_of(actions, forward) & (plan.layout.zero >= 1)
    cut |= reduced_after(actions, plan.layout)
    if gathers:
        cut |= np.isin(actions.kind, (B, BW))
    return np.where(cut, segments, one)


def first_of(actions: Actions, among: np.ndarray) -> np.ndarray:
    """The first of the chosen actions for every (rank, stage)."""
    chosen = np.flatnonzero(among)
    place = actions.rank_of()[chosen].astype(np.int64) * actions.num_stages + actions.stage[chosen]
    out = np.zeros(len(actions), bool)
    out[chosen[np.unique(place, return_index=True)[1]]] = True
    return out


def last_of(actions: Actions, among: np.ndarray) -> np.ndarray:
    chosen = np.flatnonzero(among)[::-1]
    place = actions.rank_of()[chosen].astype(np.int64) * actions.num_stages + actions.stage[chosen]
    out = np.zeros(len(actions), bool)
    out[chosen[np.unique(place, return_index=True)[1]]] = True
    return out


def add_compute(
    builder: GraphBuilder, tables: Tables, actions: Actions, stages: Stages, mesh: Mesh, index: int
) -> Compute:
    """Every action of one slice class as one task, or one per segment, on its rank's compute queue."""
    pp = stages.plan.layout.pp
    count = expansion(actions, stages)
    action = np.repeat(np.arange(len(actions)), count)
    starts = np.cumsum(count) - count
    position = np.arange(len(action)) - starts[action]
    kind, stage, rank = actions.kind[action], actions.stage[action], actions.rank_of()[action]
    whole = count[action] == 1
    segment = np.where(kind == F, position, count[action] - 1 - position)
    ids = builder.extend(
        kind,
        _pass_keys(tables, stages, mesh, index, kind, stage, rank, np.where(whole, -1, segment)),
        stream=np.array([builder.stream(index * pp + r, "compute") for r in range(pp)])[rank],
        stage=stage,
        chunk=stage // pp,
        microbatch=actions.microbatch[action],
        layer=np.where(whole, -1, np.array([ls[0] if ls else 0 for ls in stages.layers])[stage] + segment),
    )
    shape = (actions.num_stages, actions.num_microbatches)
    where = {}
    for name, kinds in (("forward", (F,)), ("backward", (B, BW))):
        chosen = np.flatnonzero(np.isin(actions.kind, kinds))
        first, last = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        at = (actions.stage[chosen], actions.microbatch[chosen])
        first[at], last[at] = ids[starts[chosen]], ids[starts[chosen] + count[chosen] - 1]
        where[name] = (first, last)
        if name == "forward":
            home = np.zeros(shape, np.int64)
            home[at] = actions.rank_of()[chosen]
    done = ids[np.array([np.flatnonzero(rank == r)[-1] for r in range(pp)])]
    return Compute(task=ids, action=action, segment=segment, home=home, done=done, **where)


def _pass_keys(tables, stages: Stages, mesh: Mesh, index: int, kind, stage, rank, segment) -> np.ndarray:
    """Cost keys of compute tasks; `segment` -1 is the whole stage."""
    slice_, compositions = mesh.slices[index], stages.compositions
    uniform = len(mesh.cluster.islands) == 1
    ranks = 1 if uniform else stages.plan.layout.pp
    shape = (4, len(compositions), ranks, int(segment.max(initial=-1)) + 2)
    code = np.ravel_multi_index((kind, stage, rank if ranks > 1 else np.zeros_like(rank), segment + 1), shape)
    key_of = np.zeros(int(np.prod(shape)), np.int64)
    for value in np.flatnonzero(np.bincount(code, minlength=len(key_of))).tolist():
        rest, seg = divmod(value, shape[3])
        rest, r = divmod(rest, shape[2])
        k, s = divmod(rest, shape[1])
        units = compositions[s].units if seg == 0 else compositions[s].segments[seg - 1]
        start = 0 if uniform else slice_.starts[r]
        beside = _beside(stages, k) if seg else ()
        share = 1 / len(compositions[s].segments) if seg else 1.0
        key_of[value] = tables(Pass(PASS_NAMES[k], units, slice_.devices[r].name, start, beside, share))
    return key_of[code]


def _beside(stages: Stages, kind: int) -> tuple[str, ...]:
    """What an expanded pass shares its device with."""
    if kind == F:
        return ("gather",)
    return ("gather", "reduce") if gathers_again(stages.plan.layout) else ("reduce",)


def describe(key: Key) -> str:
    """A cost key in words: ``BW 4 layers + head``, ``send``, ``reduce_scatter``."""
    match key:
        case Pass():
            ends = [str(u.kind) for u in key.units if isinstance(u.kind, str)]
            layers = [f"{sum(not isinstance(u.kind, str) for u in key.units)} layers"]
            head = [e for e in ends if e == "head"]
            return f"{key.which} " + " + ".join([e for e in ends if e == "embedding"] + layers + head)
        case Send():
            return "send"
        case Exchange():
            return " + ".join(op for op, _, _ in key.steps) or "nothing to exchange"
        case Update():
            return "optimizer"


def add_sends(
    builder: GraphBuilder, tables: Tables, actions: Actions, stages: Stages, mesh: Mesh, index: int, compute: Compute
) -> None:
    """Activations to the next stage, gradients back: a task on the sender's queue, or a plain edge on one rank.

    Without overlap the sender's next action waits until its message is out, as a blocking send does.
    """
    if actions.num_stages == 1:
        return
    pp, slice_, home = stages.plan.layout.pp, mesh.slices[index], compute.home
    following = np.append(compute.task[1:], -1)
    following[np.flatnonzero(np.diff(actions.rank_of()[compute.action]))] = -1
    for (first, last), source, target, queue in (
        (compute.forward, slice(None, -1), slice(1, None), "pp_forward"),
        (compute.backward, slice(1, None), slice(None, -1), "pp_backward"),
    ):
        producer, consumer = last[source].ravel(), first[target].ravel()
        a, b = home[source].ravel(), home[target].ravel()
        local = a == b
        builder.depend(consumer[local], producer[local])
        order = np.flatnonzero(~local)[np.argsort(producer[~local], kind="stable")]
        producer, consumer, a, b = producer[order], consumer[order], a[order], b[order]
        pair, back = np.unique(a * pp + b, return_inverse=True)
        keys = [tables(Send(mesh.pair(slice_.starts[v // pp], slice_.starts[v % pp]))) for v in pair.tolist()]
        streams = [builder.stream(index * pp + v // pp, queue) for v in pair.tolist()]
        stage = np.broadcast_to(np.arange(actions.num_stages)[:, None], home.shape)[source].ravel()[order]
        microbatch = np.broadcast_to(np.arange(actions.num_microbatches)[None, :], home.shape)[source].ravel()[order]
        if not len(pair):
            continue
        ids = builder.extend(
            KIND["send"], np.array(keys)[back], stream=np.array(streams)[back], stage=stage, microbatch=microbatch
        )
        builder.depend(ids, producer)
        builder.depend(consumer, ids)
        if not stages.plan.overlap.pp:
            blocked = following[producer - compute.task[0]]
            builder.depend(blocked[blocked >= 0], ids[blocked >= 0])


def verify(graph: TaskGraph) -> list[str]:
    """What a step graph must satisfy besides being acyclic, as sentences; empty when it does.

    Edges without lag point backwards, every task has a stream, a collective's members are distinct, and every
    forward has its backward.
    """
    found = []
    owner = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
    if np.any((graph.dep >= owner) & (graph.dep_lag == 0)):
        found.append("an edge without lag points forward")
    if np.any(np.diff(graph.member_ptr) == 0):
        found.append("a task occupies no stream")
    task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
    pairs = np.sort(task.astype(np.int64) * max(1, len(graph.streams)) + graph.member)
    if np.any(pairs[1:] == pairs[:-1]):
        found.append("a task occupies one stream twice")
    where = graph.attribute("stage").astype(np.int64) * 2**31 + graph.attribute("microbatch")
    forward = set(where[graph.kind == KIND["F"]].tolist())
    if forward != set(where[(graph.kind == KIND["B"]) | (graph.kind == KIND["BW"])].tolist()):
        found.append("a forward has no backward, or the other way round")
    return found
