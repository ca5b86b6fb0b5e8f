"""Binding: the roles of a structure become programs, for one plan on one cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from meshwright.graph import TaskGraph
from meshwright.layers.pieces import Context
from meshwright.lower.meeting import meeting
from meshwright.lower.place import Mesh, first_of_group, rank_classes
from meshwright.lower.program import LayerPass, Move, Program, Site, in_pieces
from meshwright.lower.residency import freed_first
from meshwright.lower.roles import (
    UPDATED,
    CodeRole,
    ExchangeRole,
    HostRole,
    MeasureRole,
    MessageRole,
    NormRole,
    PassRole,
    PredictionsRole,
    Role,
    SlopesRole,
    TransferRole,
    TwinRole,
    UpdateRole,
)
from meshwright.lower.stages import Stages
from meshwright.lower.state import measured_bytes, updated_bytes
from meshwright.lower.structure import Structure
from meshwright.lower.taught import predicted, told
from meshwright.lower.tensors import tensors_of
from meshwright.lower.tier_sizes import host_work, transfer
from meshwright.lower.units import Unit, composition_of, named
from meshwright.schedules.actions import W
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.matrices import num_matrices
from meshwright.sync.clocks import edges
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.fragments import (
    DENSE,
    EVERY,
    EXPERT,
    FOLDED,
    GRADIENTS,
    HEADED,
    NEIGHBOURS,
    REFRESHED,
    REPEATED,
    TIED,
    VECTOR,
    WHOLE,
    DividedOnWire,
    Fragment,
    OnWire,
    Weights,
    as_it_is,
    buckets,
    coded_length,
    combining,
    encodes_apart,
    expert_scope,
    norm,
    norms,
    on_wire,
    slopes,
    stored,
)
from meshwright.sync.groups import graph, messages
from meshwright.sync.moved import coded_bytes, recoded_bytes
from meshwright.sync.paths import moduled
from meshwright.sync.policy import read
from meshwright.sync.record import NO_CODEC
from meshwright.sync.rounds import turns_of
from meshwright.work import HOST_REDUCE, Elementwise, Gemm, Group, Staging

#: Exchanges of parameters and gradients that are sharded, which may go tile by tile.
TILED = ("all_gather", "reduce_scatter")
#: What is exchanged of layers once in several steps.
AVERAGE = "average"
#: What a code does with values that have arrived, and with those of an outer step alone, by name.
DECODE = "decode"
_STEPPED = {"encode": "change", DECODE: "outer step"}


class Binder:
    """Turns roles into programs. Unsharded gradients are reduced in buckets of ``bucket_bytes`` (0: whole)."""

    def __init__(self, stages: Stages, mesh: Mesh, bucket_bytes: int = 0, num_ranks: int = 0):
        """`num_ranks` wait for one another in a step; those of the plan if left out."""
        self.stages, self.mesh, self.plan = stages, mesh, stages.plan
        self.num_ranks = num_ranks or self.plan.layout.num_ranks
        self.bucket_bytes = 0 if self.plan.layout.zero else bucket_bytes
        self.again = self.plan.layout.gathers_again
        self.policy, self.stored = read(self.plan.sync.policy), stored(self.plan, stages.train)
        code = codec(self.policy.codec)
        #: Whether codes go by shapes; whether what tensor-parallel ranks hold alike is encoded apart.
        self.by_tensors, self.apart = code.factors is not None, encodes_apart(self.plan, self.policy)
        #: Where exchanges are priced: the first of the devices stands for all that meet.
        self.meeting = self.site(0, 0)
        self._exchanges: dict[ExchangeRole, Program] = {}
        self._ranks: dict[tuple[int, int], int] | None = None
        self._meetings: dict[tuple, Group] = {}

    def site(self, index: int, rank: int) -> Site:
        """The device of a pipeline rank of a class of slices."""
        return self.stages.known.site(self.mesh.slices[index].devices[rank], self.num_ranks)

    def start(self, index: int, rank: int) -> int:
        """The first rank that a pipeline rank stands for; 0 where it does not matter because all ranks are alike."""
        return 0 if self.mesh.alike else self.mesh.slices[index].starts[rank]

    def __call__(self, role: Role) -> Program:
        """The program of a role."""
        match role:
            case PassRole():
                return self._pass(role)
            case MessageRole():
                starts = self.mesh.slices[role.slice].starts
                return self.message(
                    self.mesh.pair(starts[role.source], starts[role.target]),
                    max(0, role.layer - self.stages.first_layer),
                    role.slice,
                )
            case ExchangeRole():
                return self.exchange(role)
            case TwinRole():
                return self._twins(role)
            case MeasureRole():
                return self._measure(role)
            case SlopesRole():
                return self.moving(self.over([slopes(self.plan)], self.start(role.slice, 0)))
            case PredictionsRole():
                sent = self.moving(self.over([told(self.stages)], 0, role.turn))
                return predicted(sent, self.stages, role.turn)
            case UpdateRole():
                return self._update(role)
            case CodeRole():
                return self._code(role)
            case TransferRole():
                return transfer(role, self.stages, self.mesh, self.site(role.slice, role.rank), self._at(role))
            case HostRole():
                return host_work(role, self.stages, self.mesh, self.site(role.slice, role.rank), self._at(role))
            case NormRole():
                return self.moving(self.over([norm(self.plan, self.policy)], self.start(role.slice, 0)))

    def _at(self, role: TransferRole | HostRole) -> int:
        """A rank that a transfer is on."""
        return self.mesh.slices[role.slice].starts[role.rank]

    def _pass(self, role: PassRole) -> Program:
        site, start = self.site(role.slice, role.rank), self.start(role.slice, role.rank)
        if role.beside:
            return self._over(role, site, start)
        stages = self.stages.each[role.slice]
        key, known = (role.which, role.units, site, stages.context(start).groups), stages.known.programs
        found = known.get(key)
        if found is None:
            found = known[key] = self._over(role, site, start)
        return found

    def _over(self, role: PassRole, site: Site, start: int) -> Program:
        passes: dict[Unit, LayerPass] = {}
        for unit in role.units:
            if unit not in passes:
                passes[unit] = self.stages.each[role.slice].layer_pass(unit, role.which, start)
        update = self.updated_params(role.units, role.slice) if UPDATED in role.beside else None
        updated = None if update is None else self.updating(update, site, role.slice)
        what = () if updated is not None else role.beside
        beside = tuple(self.exchange(ExchangeRole(one, role.units, role.rank)) for one in what)
        copied = zip(role.beside, beside) if self.again else ()
        return Program(
            kind="pass",
            name=named(role.which, role.units),
            site=site,
            which=role.which,
            layers=tuple([passes[unit] for unit in role.units]),
            beside=beside,
            copies=tuple(
                Staging(what=what, num_bytes=move.num_bytes) for what, one in copied for move in one.moves[:1]
            ),
            share=role.share,
            work=None if updated is None else updated.work,
        )

    def message(self, pair: Group, layer: int = 0, index: int = 0) -> Program:
        """A stage's output: each tensor-parallel rank sends its share, gathered again on arrival where the layer
        does not keep the sequence sharded (Narayanan et al. 2104.04473, section 4.1). In a model of several streams of
        tokens all that `layer` and those behind it read is sent; without one, the least that any border passes. A
        microbatch is one of the class of slices `index`."""
        c = self.stages.each[index].context()
        size = self._carried(c, layer) * c.element / c.tp
        moves = [Move("send", size, pair)]
        if c.tp > 1 and not c.sp:
            moves.append(Move("all_gather", size * c.tp, c.tp_group))
        return Program(kind="send", name="send", site=self.meeting, moves=tuple(moves))

    def _carried(self, c: Context, layer: int) -> float:
        """Numbers of a microbatch that pass the border before a layer, over all tensor-parallel ranks."""
        model = self.stages.model
        if len(model.flows) == 1:
            return c.tokens * c.hidden

        def passed(border: int) -> int:
            return sum(c.at(s).tokens * c.at(s).hidden for s in model.carried(border))

        return passed(layer) if layer else min(passed(border) for border in range(1, model.num_layers))

    def exchange(self, role: ExchangeRole) -> Program:
        """The collectives that gather the parameters or reduce the gradients of some layers: dense ones over dp*cp,
        experts over their replicas."""
        found = self._exchanges.get(role)
        if found is None:
            start = first_of_group(self.mesh, self.start(0, role.rank))
            whole = self.policy.plain and role.what not in (FOLDED, REFRESHED)
            some = (role.units,) if whole else composition_of(role.units).segments
            steps = (step for units in some for step in self.steps(units, role.what, start, role.part))
            found = self.moving(tuple(steps))
            if role.what == GRADIENTS and self.plan.overlap.yield_mb:
                moves = in_pieces(found.moves, self.plan.overlap.yield_mb * 1e6)
                found = msgspec.structs.replace(found, moves=moves, yields=True)
            whats = role.what.split("+")
            coded = [f for units in some for f in self.fragments(units) if f.what in whats and f.within != NO_CODEC]
            if coded:
                size = sum(map(recoded_bytes, coded))
                work = Elementwise(num_bytes=size, kernels=2 * len(coded), fused=True)
                found = msgspec.structs.replace(found, work=work)
            if role.what == AVERAGE:
                found = msgspec.structs.replace(found, name=f"average by {found.name}", **self._due(role))
            self._exchanges[role] = found
        return found

    def steps(
        self, units: tuple[Unit, ...], what: str, start: int, turn: int = 0
    ) -> tuple[tuple[str, float, Group], ...]:
        """Collectives (op, bytes, group) that gather or reduce some layers, on the ranks around `start`; where some
        meet, those of a `turn`."""
        whats = what.split("+")
        some = [f for f in self.fragments(units) if (AVERAGE if f.due == EVERY else f.what) in whats]
        return self.over(some, start, turn)

    def fragments(self, units: tuple[Unit, ...]) -> list[Fragment]:
        """Return the fragments of some layers on one rank, which are all ``plain`` or all not."""
        heads = tuple(u for u in units if u.kind == HEAD) if self.policy.own_heads else ()
        if 0 < len(heads) < len(units):
            return [*self.fragments(tuple(u for u in units if u.kind != HEAD)), *self.fragments(heads)]
        params = self.stages.total_params(units)
        found: list[Fragment] = []
        tied = 0.0 if self.policy.alike or not params.trained_dense else self._tied(units)
        whole, repeated = (params.whole, params.repeated) if self.apart and not heads else (0.0, 0.0)
        beside = tied + whole + repeated
        vectors, rule = 0.0, self.policy.rule
        shapes = self._tensors(units, fused=rule.vectors_apart) if self.by_tensors or rule.vectors_apart else {}
        if rule.vectors_apart:
            vectors = params.trained_dense - tied - sum(one.size for one in shapes.get(DENSE, ()))
            beside += vectors
        for kind, held, trained in (
            (TIED, tied, tied),
            (WHOLE, whole, whole),
            (REPEATED, repeated, repeated),
            (VECTOR, vectors, vectors),
            (HEADED if heads else DENSE, params.dense - beside, params.trained_dense - beside),
            (EXPERT, params.expert, params.trained_expert),
        ):
            if held:
                weights = Weights(0, 0, kind, held, trained, tensors=shapes.get(kind, ()))
                some = rule.fragments(self.plan, self.policy, weights, self.stored)
                found += [moduled(f, self.policy, units[0].level) for f in some]
        if self.plan.kinds.hold:
            found = [msgspec.structs.replace(f, padding=self.mesh.padding) for f in found]
        return [as_it_is(f) for f in found] if units and units[0].plain else found

    def _tensors(self, units: tuple[Unit, ...], *, fused: bool) -> dict[str, tuple[Tensor, ...]]:
        """The shapes of the trained parameters of some layers on one rank, by kind."""
        found: dict[str, tuple[Tensor, ...]] = {}
        for unit in units:
            for kind, some in tensors_of(self.stages, unit, fused=fused).items():
                found[kind] = found.get(kind, ()) + tuple(self._cut(one) for one in some)
        return found

    def _cut(self, one: Tensor) -> Tensor:
        """A matrix with the rank that the code chooses for its shape, among all that a prediction knows of."""
        ranks = codec(self.policy.codec).ranks
        if ranks is None:
            return one
        if self._ranks is None:
            every = [u for c in self.stages.compositions for u in c.units]
            self._ranks = ranks(tuple(t for u in every for some in tensors_of(self.stages, u).values() for t in some))
        return one._replace(rank=self._ranks.get((one.rows, one.columns), 0))

    def _tied(self, units: tuple[Unit, ...]) -> float:
        """Numbers among these layers of a table that the embedding and the head have in common: a code of its own."""
        model = self.stages.model
        if not model.tied_embeddings or self.stages.train.lora is not None:
            return 0.0
        copies = (u.kind == EMBEDDING or (u.kind == HEAD and not self.stages.ends_meet) for u in units)
        return model.table_params / self.plan.layout.tp if any(copies) else 0.0

    def _due(self, role: ExchangeRole | CodeRole) -> dict[str, int | bool]:
        """When a task of an average is due, as a program says it."""
        found = self.fragments(role.units)
        # layers without anything that is trained have no fragments
        every, lag = max((f.every for f in found), default=1), max((f.lag for f in found), default=0)
        turns = max((turns_of(self.policy, f.replica.size) for f in found if f.due == EVERY), default=0)
        every, applies = every * max(1, turns), role.what == DECODE and (every > 1 or lag > 0 or turns > 1)
        clocked = self.policy.clocks is not None
        return {"every": every, "part": role.part, "lag": lag, "applies": applies, "clocked": clocked}

    def over(self, fragments: Iterable[Fragment], start: int, turn: int = 0) -> tuple[tuple[str, float, Group], ...]:
        """The collectives of fragments that are due together, on the ranks around `start`."""
        named = ((t.op, t.num_bytes, self._among(t, start, turn)) for t in on_wire(fragments))
        return tuple(step for step in named if step[2].size > 1)

    def _among(self, one: OnWire | DividedOnWire, start: int, turn: int) -> Group:
        group = self.mesh.among(one.among.name, start)
        if one.op == HOST_REDUCE:
            return self.mesh.hosted(group)
        if one.op != NEIGHBOURS:
            return group
        parts = one.parts if isinstance(one, DividedOnWire) else None
        key = one.among.name, start, turn, parts
        if key not in self._meetings:
            met = parts.messages() if parts else messages(graph(self.policy.group, one.among.size).at(turn))
            if self.policy.clocks is not None:  # two meet at a time: those that are furthest apart
                i, j = max(edges(graph(self.policy.group, one.among.size)), key=lambda pair: pair[1] - pair[0])
                met = [(i, j, 1.0), (j, i, 1.0)]
            self._meetings[key] = meeting(self.mesh, group, start, list(met))
        return self._meetings[key]

    def moving(self, steps: tuple[tuple[str, float, Group], ...]) -> Program:
        """A program of collectives (op, bytes, group), one after the other."""
        late = self.plan.gathers_after and {op for op, *_ in steps} == {"all_gather"}
        sharded = "late" if late else "layers" if self.plan.layout.gathers_again else ""
        tiles = self.plan.offload.tiles if self.plan.layout.zero == 3 else 1
        moves = tuple(
            Move(op, size, group, buckets(op, size, self.bucket_bytes) * (tiles if op in TILED else 1), sharded)
            for op, size, group in steps
        )
        name = " + ".join(op for op, _, _ in steps) or "nothing to exchange"
        return Program(kind="exchange", name=name, site=self.meeting, moves=moves)

    def _twins(self, role: TwinRole) -> Program:
        stages, starts = self.stages, self.mesh.slices[role.slice].starts
        if role.units:
            params = stages.total_params(role.units)
            numbers = params.trained_dense + params.trained_expert
        else:
            model = stages.model
            numbers = model.table_params / self.plan.layout.tp
        a, b = role.ranks
        size = numbers * self.stored.grads
        return self.moving((("all_reduce", size, self.mesh.pair(starts[a], starts[b])),))

    def _update(self, role: UpdateRole) -> Program:
        site = self.site(role.slice, role.rank)
        if self.stages.forwards:  # a direction is added for every pass, and taken away, then one for every replica
            passes = self.stages.forwards + 1 + self.plan.layout.dp
            size = 2.0 * self.stored.masters * passes * self.stages.total_params(role.units).dense
            work = Elementwise(num_bytes=size, kernels=2 * passes, fused=True, operator="optimizer")
            return Program(kind="update", name="directions", site=site, work=work)
        return self.updating(self.updated_params(role.units, role.slice), site, role.slice)

    def updating(self, params: float, site: Site, index: int = 0) -> Program:
        """The optimizer's step over so many parameters of one rank of a class of slices."""
        size = params * updated_bytes(self.stages.each[index].plan, self.stages.train)
        work = Elementwise(num_bytes=size, kernels=8 if params else 0, fused=True, operator="optimizer")
        return Program(kind="update", name="optimizer", site=site, work=work)

    def _measure(self, role: MeasureRole) -> Program:
        """The norms of some layers' matrices and of their updates, or the sum of all ranks' squares."""
        if not role.units:
            squares = norms(self.plan, self.policy, num_matrices(self.stages.model))
            return self.moving(self.over([squares], self.start(role.slice, 0)))
        size = self.updated_params(role.units, role.slice) * measured_bytes(self.plan, self.stages.train)
        work = Elementwise(num_bytes=size, kernels=8, fused=True, operator="optimizer")
        return Program(kind="update", name="norms of matrices", site=self.site(role.slice, role.rank), work=work)

    def _code(self, role: CodeRole) -> Program:
        units = (role.units,) if self.policy.plain else composition_of(role.units).segments
        coded = [f for some in units for f in self.fragments(some) if f.due == EVERY or not f.plain]
        size, last = sum(coded_bytes(f)[role.what == DECODE] for f in coded), role.what == DECODE
        kernels = sum(2 + (combining(f).kernels(f.replica.size) if last and f.collected else 0) for f in coded)
        work = Elementwise(num_bytes=size, kernels=kernels, fused=True)
        site, name = self.site(role.slice, role.rank), _STEPPED[role.what] if self.policy.plain else role.what
        products = tuple(one for f in coded for one in (*self._factored(f, role.what), *_combined(f, role.what)))
        return Program(kind="update", name=name, site=site, work=work, products=products, **self._due(role))

    def _factored(self, f: Fragment, what: str) -> Iterator[Gemm]:
        """The matrix products of a code that sends factors: both sides of a power iteration, and their product."""
        code = codec(f.codec)
        factors = code.factors
        if code.products is not None:  # forth, and back for what was lost; the sum of all is transformed back once
            for m, n, k in code.products(coded_length(f)) * (1 if what == DECODE else 2):
                yield Gemm(m=m, n=n, k=k, dtype="fp32", out_bytes=f.element_bytes)
        sizes = _sizes(f)
        for one in () if factors is None else factors(coded_length(f), f.tensors):
            rows, columns, rank, batch = one.rows, one.columns, one.rank, one.times
            if what == DECODE:
                yield Gemm(m=rows, n=columns, k=rank, batch=batch, **sizes)
            else:
                yield Gemm(m=rows, n=rank, k=columns, batch=batch, **sizes)
                yield Gemm(m=columns, n=rank, k=rows, batch=batch, **sizes)

    def updated_params(self, units: tuple[Unit, ...], index: int | None = None) -> float:
        """Parameters that the optimizer of one rank of a class of slices touches; of that with the fewest without."""
        params, layout = self.stages.total_params(units), self.plan.layout
        if not layout.zero:
            return params.trained_dense + params.trained_expert
        part = min(self.mesh.held) if index is None else self.mesh.held[index]
        return params.trained_dense * part + params.trained_expert / expert_scope(self.plan)


def _combined(f: Fragment, what: str) -> Iterator[Gemm]:
    """The matrix products of combining what all copies bring."""
    if what == DECODE and f.collected:
        for m, n, k in combining(f).products(f.replica.size, coded_length(f)):
            yield Gemm(m=m, n=n, k=k, **_sizes(f))


def _sizes(f: Fragment) -> dict[str, Any]:
    """The types of matrix products with the values of a fragment."""
    return {"dtype": "fp32" if f.element_bytes > 2 else "bf16", "out_bytes": f.element_bytes}


def bound(structure: Structure, binder: Binder) -> tuple[TaskGraph, tuple[Program, ...]]:
    """The structure's graph with a plan's programs for cost keys, its bytes and its rank classes; and the programs."""
    programs: dict[Program, int] = {}
    number = np.array([programs.setdefault(binder(role), len(programs)) for role in structure.roles], np.int32)
    graph, stages, mesh = structure.graph, binder.stages, binder.mesh
    if (memory := graph.memory) is not None:
        memory = msgspec.structs.replace(
            memory, num_bytes=structure.sizes.of_events(stages, structure.codes, memory.rank)
        )
        if np.any(structure.actions.kind == W):
            memory = freed_first(memory)
    bound = msgspec.structs.replace(
        graph,
        cost_key=number[graph.cost_key],
        keys=tuple(f"{program.name} #{i}" for i, program in enumerate(programs)),
        streams=msgspec.structs.replace(graph.streams, ranks=rank_classes(mesh)),
        memory=memory,
    )
    return bound, tuple(programs)
