"""Lowering a plan of several pools: each pool's stages on its own devices, one structure, programs bound pool by pool,
and for links by what both ends hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright import schedules
from meshwright.graph import TaskGraph
from meshwright.layers.kind import Tokens
from meshwright.lower.bind import Binder
from meshwright.lower.facts import Facts, facts_of
from meshwright.lower.joint import NO_POOL, Crossing, Joint, JointFacts, joint
from meshwright.lower.place import Mesh, rank_classes
from meshwright.lower.program import Move, Program
from meshwright.lower.residency import constant_bytes, freed_first
from meshwright.lower.roles import LinkRole
from meshwright.lower.stages import Stages
from meshwright.lower.waves import ahead
from meshwright.plan import Layout, Plan, Pool
from meshwright.plan.pool import held
from meshwright.schedules.actions import Actions
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train


class PoolStages(msgspec.Struct, frozen=True, kw_only=True):
    """A pool on its devices: the stages of its part of the model, the first of its layers and the one after the last,
    and the schedule's parameters that were found for its times."""

    pool: Pool
    stages: Stages
    layers: tuple[int, int]
    schedule_params: dict[str, object] = {}

    @property
    def begin(self) -> int:
        """The pool's first device on the cluster."""
        return self.pool.devices[0]


def placed(plan: Plan, model: Model, cluster: Cluster, train: Train) -> tuple[PoolStages, ...]:
    """The pools of a legal plan on their devices."""
    out = []
    for pool, layers in zip(plan.pools, held(plan.pools, model)):
        mesh = Mesh(pool.plan, cut(cluster, *pool.devices))
        part = part_of(model, *layers)
        stages = Stages(pool.plan, part, train, mesh, frozen=pool.frozen, first_layer=layers[0])
        out.append(PoolStages(pool=pool, stages=stages, layers=layers))
    return tuple(out)


def joined(pools: tuple[PoolStages, ...], plan: Plan) -> Joint:
    """The structure of a step of these pools."""
    crossing = crossings(plan)
    facts = [facts_of(one.stages, one.schedule_params or None) for one in pools]
    for i, count in enumerate(leads(tuple(map(_order, facts)), crossing)):
        facts[i] = msgspec.structs.replace(facts[i], ahead=count)
    return joint(JointFacts(pools=tuple(facts), crossings=crossing))


def crossings(plan: Plan) -> tuple[Crossing, ...]:
    """The links of a plan whose pools have their devices."""
    number = {pool.name: i for i, pool in enumerate(plan.pools)}
    waves = [pool.plan.layout.dp * pool.plan.pipeline.microbatch for pool in plan.pools]
    ends = [(number[link.source], number[link.target]) for link in plan.links]
    return tuple(
        Crossing(source=a, target=b, waves=(waves[a], waves[b]), back=not plan.pools[a].frozen) for a, b in ends
    )


def orders(plan: Plan, global_batch: int, params: Mapping[str, Mapping[str, Any]]) -> tuple[Actions, ...]:
    """Return the actions of every pool's ranks in a step, in order. `params` are those of each pool's schedule, by the
    pool's name."""
    own = []
    for pool in plan.pools:
        pipeline, count = pool.plan.pipeline, pool.plan.num_microbatches(global_batch)
        said = dict(params.get(pool.name, {}))
        own.append(schedules.build(pipeline.schedule, pool.plan.layout.pp, count, pipeline.vpp, **said))
    counts = leads(tuple(own), crossings(plan))
    return tuple(
        one.forwards() if pool.frozen else one.ahead(count) for pool, one, count in zip(plan.pools, own, counts)
    )


def _order(facts: Facts) -> Actions:
    return schedules.build(facts.schedule, facts.pp, facts.counts[0], facts.vpp, **dict(facts.params))


def leads(orders: tuple[Actions, ...], crossings: tuple[Crossing, ...]) -> list[int]:
    """Microbatches that each pool is further ahead than its own schedule, from the last pool to the first."""
    out = [0] * len(orders)
    following = {one.source: one for one in crossings if one.back}
    ready: dict[int, Actions] = {}

    def order(pool: int) -> Actions:
        if pool not in ready:
            one = following.get(pool)
            if one is not None:
                out[pool] = ahead(orders[pool], order(one.target), one.waves)
            ready[pool] = orders[pool].ahead(out[pool])
        return ready[pool]

    for pool in range(len(orders)):
        order(pool)
    return out


class LinkBinder:
    """Turns messages between pools, and the norm of all, into programs. ``mesh`` is all devices in a row."""

    def __init__(self, found: Joint, pools: tuple[PoolStages, ...], binders: list[Binder], model: Model, mesh: Mesh):
        self.found, self.pools, self.binders, self.model, self.mesh = found, pools, binders, model, mesh

    def __call__(self, role: LinkRole) -> Program:
        """The program of a message: each tensor- and context-parallel rank of the sender sends its share of the tokens
        to those that need it, and whichever rank sends or receives most sets the time; shares are gathered on arrival
        where layers do not keep the sequence sharded."""
        one = self.found.facts.crossings[role.link]
        ends = (one.target, one.source) if role.back else (one.source, one.target)
        a, b = (self.pools[end] for end in ends)
        sent, received = (self.bytes_of(role.link, role.sequences, end) for end in (a, b))
        stages = len(a.stages.layers), len(b.stages.layers)
        ranks = self._rank(a, role.slice, 0 if role.back else stages[0] - 1, ends[0])
        arrives = self._rank(b, 0, stages[1] - 1 if role.back else 0, ends[1])
        moves = [Move("send", max(sent, received), self.mesh.pair(ranks, arrives))]
        c = b.stages.context()
        if c.tp > 1 and not c.sp:
            moves.append(Move("all_gather", received * c.tp, c.tp_group))
        name = f"link to {b.pool.name}"
        return Program(kind="send", name=name, site=self.binders[ends[0]].meeting, moves=tuple(moves))

    def bytes_of(self, link: int, sequences: int, end: PoolStages) -> float:
        """Bytes of so many sequences of a link that one rank at an end sends or receives."""
        layout, train = end.pool.plan.layout, end.stages.train
        boundary = self.pools[self.found.facts.crossings[link].target].layers[0]
        own = min(sequences, end.pool.plan.pipeline.microbatch)
        tokens = Tokens(model=self.model, batch=train.microbatch(1), rows=1, stream=0)
        streams = (tokens.at(stream) for stream in self.model.carried(boundary))
        element = self.pools[self.found.facts.crossings[link].source].stages.context().element
        each = sum(stream.count * stream.hidden for stream in streams) * element
        return own * each / (layout.tp * layout.cp)

    def _rank(self, end: PoolStages, index: int, stage: int, pool: int) -> int:
        """A rank of a stage, on the cluster."""
        actions = self.found.structures[pool].actions
        return end.begin + end.stages.mesh.slices[index].starts[actions.stage_ranks[stage][0]]

    def norm(self) -> Program:
        """The gradient norm of all pools that are trained."""
        group = self.mesh.group("dp")
        trained = next(i for i, one in enumerate(self.pools) if not one.pool.frozen)
        moves = (Move("all_reduce", 4.0, group),) if group.size > 1 else ()
        return Program(kind="exchange", name="all_reduce", site=self.binders[trained].meeting, moves=moves)


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A joint structure bound to one plan; of every pool its programs, actions and constant bytes."""

    graph: TaskGraph
    programs: tuple[Program, ...]
    mesh: Mesh
    own: tuple[tuple[Program, ...], ...]
    actions: tuple[Actions, ...]
    static_bytes: tuple[tuple[dict[str, float], ...], ...]


def bound(found: Joint, pools: tuple[PoolStages, ...], model: Model, cluster: Cluster, bucket_bytes: int) -> Bound:
    """The programs, bytes and rank classes of a structure, for one plan."""
    total = sum(one.stages.mesh.num_ranks for one in pools)
    mesh = Mesh(Plan(layout=Layout(dp=total)), cluster)
    binders = [Binder(one.stages, one.stages.mesh, bucket_bytes, num_ranks=total) for one in pools]
    links = LinkBinder(found, pools, binders, model, mesh)
    programs: dict[Program, int] = {}
    own: list[dict[Program, None]] = [{} for _ in pools]
    numbers = []
    for role, owner in zip(found.roles, found.owners):
        if owner != NO_POOL:
            program = binders[owner](role)
            own[owner][program] = None
        else:
            program = links(role) if isinstance(role, LinkRole) else links.norm()
        numbers.append(programs.setdefault(program, len(programs)))
    graph = found.graph
    memory = graph.memory
    if memory is not None:
        tables = [s.sizes.bytes_of(one.stages) for s, one in zip(found.structures, pools)]
        tables.append(_between(found, links))
        memory = freed_first(msgspec.structs.replace(memory, num_bytes=np.concatenate(tables)[found.codes]))
    classes = [msgspec.structs.replace(c, pool=one.pool.name) for one in pools for c in rank_classes(one.stages.mesh)]
    return Bound(
        graph=msgspec.structs.replace(
            graph,
            cost_key=np.array(numbers, np.int32)[graph.cost_key],
            keys=tuple(f"{program.name} #{i}" for i, program in enumerate(programs)),
            streams=msgspec.structs.replace(graph.streams, ranks=tuple(classes)),
            memory=memory,
        ),
        programs=tuple(programs),
        mesh=mesh,
        own=tuple(tuple(one) for one in own),
        actions=tuple(s.actions for s in found.structures),
        static_bytes=tuple(constant_bytes(one.stages, s.actions) for s, one in zip(found.structures, pools)),
    )


def _between(found: Joint, links: LinkBinder) -> np.ndarray:
    """Bytes of messages at the source and at the target, as they appear and as they go."""
    out: list[float] = []
    for link, sequences in found.carried:
        one = found.facts.crossings[link]
        for end in (one.source, one.target):
            size = links.bytes_of(link, sequences, links.pools[end])
            out += [size, -size]
    return np.array(out)
