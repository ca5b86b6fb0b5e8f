"""A training step of a recommendation model: its programs, and the graph of what waits for what.

Every rank looks up rows of the tables it holds for the whole batch, and has the vectors of its own samples after an
all-to-all (of a table that is cut by rows: a reduce-scatter of partial sums). Dense layers are replicated. Backward the
gradients of the vectors go the same way back, and update the rows that were looked up; gradients of dense layers and
replicated tables are summed. The indices of the next step's samples are sent to the tables' ranks beside the forward,
as TorchRec's pipeline does (Mudigere et al., 2022, arXiv 2104.05158).

With towers (DMT, Luo et al., 2024, arXiv 2403.00877) the vectors of a node's tables are exchanged inside the node, so
that the rank of place k has those of all samples of ranks of place k in any node; a tower module makes fewer of them;
and ranks of equal place exchange what is left between nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import msgspec

from meshwright.assign.tables import REPLICATED, ROWS, TableItem, TablePlacement
from meshwright.graph import GraphBuilder, RankClass, TaskGraph
from meshwright.lower.entry import Entry
from meshwright.lower.place import Mesh
from meshwright.lower.program import LayerPass, Move, Program, Site
from meshwright.plan.facets.embeddings import NODE
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.recommender import DOT, EmbeddingTable, Recommender
from meshwright.spec.samples import SampleBatch
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import Elementwise, Gemm, Group

#: Bytes of a number of a table, of its optimizer's state, and of an index.
NUMBER, STATE, INDEX = 4.0, 4.0, 8.0
#: Names of the programs that look rows up and update them, which an attribution tells from other kernels.
LOOKUP, ROW_UPDATE, GRADIENT = "embedding lookup", "embedding update", "embedding gradient"


class TableTraffic(NamedTuple):
    """Bytes through a device's memory for one table, by so many samples: of its lookups, and of the update of the rows
    that were looked up."""

    lookup: float
    update: float


def traffic(table: EmbeddingTable, samples: float, work: SampleBatch, *, dense: bool = False) -> TableTraffic:
    """Return the bytes of a table's lookups and of its update. Forward an index and a row are read for every lookup,
    and a sum is written for every sample. Backward an index and the gradient of its sample are read for every lookup;
    every row that was looked up, at most all, is read and written with its optimizer state. Of a replicated table a
    ``dense`` gradient is written in place of that, to be summed over replicas."""
    looked, vector = samples * table.pooling, table.dim * NUMBER
    forward = looked * (INDEX + vector) + samples * vector
    state = STATE * (work.row_state + work.number_state * table.dim)
    rows = min(looked, float(table.rows))
    changed = table.num_params * NUMBER if dense else rows * 2 * (vector + state)
    return TableTraffic(forward, looked * (INDEX + vector) + changed)


def table_bytes(table: EmbeddingTable, work: SampleBatch) -> float:
    """Return the bytes of a table and of its optimizer state."""
    return table.num_params * NUMBER + table.rows * STATE * (work.row_state + work.number_state * table.dim)


class RankTables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of one rank: bytes of a step's ``lookup``, ``update`` and, of replicated tables,
    ``gradient``, the ``width`` of the vectors that it has whole or sliced, bytes of the ``indices`` that it is sent and
    of the ``tables`` that it holds."""

    lookup: float = 0.0
    update: float = 0.0
    gradient: float = 0.0
    width: int = 0
    indices: float = 0.0
    tables: float = 0.0


class RecommendingStep(msgspec.Struct, frozen=True, kw_only=True):
    """A lowered step: its ``graph``, whose cost keys are numbers of ``programs``; ``ranks`` are the tables of every
    rank, ``classes`` the ranks of each rank class of the graph; ``dense_params`` of a rank, ``features`` that meet in
    the interaction, ``widest`` the vectors (numbers) of a sample that a rank receives, and ``sent_far`` the bytes that
    the busiest rank brings into exchanges that cross nodes, forward."""

    graph: TaskGraph
    programs: tuple[Program, ...]
    ranks: tuple[RankTables, ...]
    classes: tuple[tuple[int, ...], ...]
    dense_params: int
    features: int
    widest: int
    sent_far: float
    placement: TablePlacement


def items_of(
    model: Recommender, work: SampleBatch, ways: tuple[tuple[str, int], ...], byte_s: float, sent_s: float
) -> tuple[TableItem, ...]:
    """Return the items of tables in their ``ways``, each with its slices. A table costs the seconds of its bytes
    through memory, at ``byte_s`` each, and of the vectors that its rank sends and whose gradients it receives, at
    ``sent_s``."""
    out = []
    for table, (way, parts) in zip(model.tables, ways):
        moved = traffic(table, float(work.batch), work)
        sent = 2 * work.batch * table.dim * NUMBER * sent_s
        size = table_bytes(table, work) + (parts - 1) * table.rows * STATE * work.row_state  # each slice has its own
        out.append(TableItem(way, parts, size, (moved.lookup + moved.update) * byte_s + sent))
    return tuple(out)


class _Step:
    """The programs of a step on equal ranks."""

    def __init__(self, model: Recommender, plan: Plan, cluster: Cluster, work: SampleBatch, placement: TablePlacement):
        self.model, self.plan, self.work, self.placement = model, plan, work, placement
        self.mesh = Mesh(plan, cluster)
        self.num_ranks = plan.layout.num_ranks
        self.node = min(cluster.islands[0].node.devices, self.num_ranks)
        self.site = Site(device=cluster.islands[0].device, num_ranks=self.num_ranks)
        self.towers = plan.embeddings.towers == NODE
        self.own = work.batch // self.num_ranks
        self.element = DTYPE_BYTES[work.dtype]
        self.pooled = DTYPE_BYTES[plan.embeddings.pooled]
        self.all = self.mesh.group("dp")
        self.near = self.mesh.along(1, placement.tower) if self.towers else self.all
        self.ranks = tuple(map(self._rank, range(self.num_ranks)))

    def _rank(self, rank: int) -> RankTables:
        lookup = update = gradient = indices = held = 0.0
        width = 0
        for number, table in enumerate(self.model.tables):
            item = self.placement.items[number]
            if item.way == REPLICATED:
                moved = traffic(table, float(self.own), self.work, dense=True)
                lookup, gradient, held = lookup + moved.lookup, gradient + moved.update, held + item.num_bytes
                continue
            holders = self.placement.ranks(number)
            for _ in range(holders.count(rank)):
                share = 1 / len(holders)
                part = msgspec.structs.replace(table, dim=table.dim // item.parts)
                by_rows = item.way == ROWS
                if by_rows:  # rows are looked up as often as others; sums of all samples are partial
                    part = msgspec.structs.replace(part, rows=ceil(table.rows * share), pooling=table.pooling * share)
                moved = traffic(part, float(self.work.batch), self.work)
                lookup, update, held = lookup + moved.lookup, update + moved.update, held + item.num_bytes * share
                indices += self.work.batch * part.pooling * INDEX
                width += 0 if by_rows else part.dim
        return RankTables(lookup=lookup, update=update, gradient=gradient, width=width, indices=indices, tables=held)

    def row_width(self, tower: int) -> int:
        """Numbers of a sample whose partial sums every rank of a tower has."""
        items, of = self.placement.items, self.placement.tower_of
        return sum(t.dim for n, t in enumerate(self.model.tables) if items[n].way == ROWS and of[n] == tower)

    def tower_width(self, tower: int) -> int:
        """Numbers of a sample that the tables of a tower give."""
        return sum(t.dim for t, of in zip(self.model.tables, self.placement.tower_of) if of == tower)

    @property
    def left_widths(self) -> tuple[int, ...]:
        """Numbers of a sample that leave every tower: whole vectors, one at least where it has tables."""
        dim, keep = self.model.dim, self.plan.embeddings.compress
        count = self.num_ranks // self.placement.tower
        return tuple(ceil(self.tower_width(t) // dim / keep) * dim for t in range(count))

    @property
    def features(self) -> int:
        """Vectors that meet in the interaction: those of tables, as towers leave them, and the dense one."""
        alike = sum(item.way == REPLICATED for item in self.placement.items)
        left = sum(self.left_widths) if self.towers else sum(map(self.tower_width, (0,)))
        return left // self.model.dim + alike + 1

    def uneven(self, sent: list[float], group: Group) -> tuple[float, Group]:
        """Return the bytes of the busiest rank of an exchange, and the group with what the busiest node's port carries
        over as many times that. Every rank receives as much as all send in the mean, and sends no less."""
        busiest = max(max(sent), sum(sent) / len(sent))
        if not busiest or not any(hop.scale_out for hop in group.hops):
            return busiest, group
        nodes = [sent[i : i + self.node] for i in range(0, len(sent), self.node)]
        carried = max(max(sum(n) / len(n) for n in nodes), sum(sent) / len(sent)) / busiest
        hops = tuple(msgspec.structs.replace(h, carried=carried) if h.scale_out else h for h in group.hops)
        return busiest, msgspec.structs.replace(group, hops=hops)

    # -- programs -----------------------------------------------------------------------------------------------------

    def memory_bound(self, name: str, num_bytes: float, kind: str = "pass") -> Program:
        """A kernel over tables: bytes at the memory's rate, in rows of hundreds of bytes."""
        kernel = Elementwise(num_bytes=num_bytes, fused=True, operator=name)
        if kind == "update":
            return Program(kind="update", name=name, site=self.site, work=kernel)
        return self.passed(name, "F", (Entry(name, "compute", kernel, ()),))

    def passed(self, name: str, which: str, entries: tuple[Entry, ...]) -> Program:
        """Kernels of dense layers, one after the other: one of the three parts of a forward, or the two of a
        backward."""
        layers = (LayerPass(which=which, entries=entries),)
        return Program(
            kind="pass", name=name, site=self.site, which=which, layers=layers, share=1 / (3 if which == "F" else 2)
        )

    def exchanged(self, name: str, moves: list[Move], recoded: float = 0.0) -> Program:
        """Collectives one after the other, and the bytes by which values are made shorter and long again."""
        kernel = Elementwise(num_bytes=recoded, kernels=2, fused=True) if recoded else None
        return Program(
            kind="exchange", name=name, site=self.site, moves=tuple(m for m in moves if m.num_bytes), work=kernel
        )

    def pooled_there(self, back: bool) -> list[Program]:
        """The exchanges of pooled vectors, or ``back`` of their gradients, with tower modules between them."""
        batch, near = float(self.work.batch), self.near
        if self.towers:
            sent = [batch * r.width * self.pooled for r in self.ranks]
            size, group = self.uneven(sent, near)
            by_rows = max(map(self.row_width, range(len(self.left_widths))))
        else:
            size, group = self.uneven([batch * r.width * self.pooled for r in self.ranks], self.all)
            by_rows = self.row_width(0)
        moves = [Move("all_to_all", size, group)]
        moves.append(Move("all_gather" if back else "reduce_scatter", batch * by_rows * self.pooled, near))
        widest = max(r.width for r in self.ranks) + by_rows
        short = 2 * batch * widest * (NUMBER + self.pooled) if self.pooled != NUMBER else 0.0
        first = self.exchanged("gradients of embeddings" if back else "pooled embeddings", moves, short)
        if not self.towers:
            return [first]
        left = batch / self.placement.tower * max(self.left_widths) * self.pooled
        far = self.mesh.along(self.placement.tower, self.num_ranks // self.placement.tower)
        between = self.exchanged("gradients between towers" if back else "towers", [Move("all_to_all", left, far)])
        return [between, first] if back else [first, between]

    def module(self, which: str) -> Program | None:
        """The tower module of the widest tower, of the samples that a rank has there; None where vectors leave as they
        are."""
        if self.plan.embeddings.compress == 1:
            return None
        m = self.work.batch // self.placement.tower
        k, n = max((self.tower_width(t), left) for t, left in enumerate(self.left_widths))
        entries = self._products([(k, n)], m, which, first=True, activated=False)
        return Program(
            kind="pass",
            name="tower module",
            site=self.site,
            which=which,
            layers=(LayerPass(which=which, entries=entries),),
            share=0.0,
        )

    @property
    def module_params(self) -> int:
        """Parameters of the largest tower module: a product and its bias; 0 without one."""
        if self.plan.embeddings.compress == 1:
            return 0
        return max(self.tower_width(t) * left + left for t, left in enumerate(self.left_widths))

    def bottom(self, which: str) -> Program:
        """The bottom MLP."""
        return self.passed(
            "bottom MLP", which, self._products(self.model.bottom_products(), self.own, which, first=False)
        )

    def top(self, which: str) -> Program:
        """The interaction and the top MLP, in the order of the pass."""
        model, m, count = self.model, self.own, self.features
        width = model.met_width(count)
        top = self._products(model.top_products(count), m, which, first=True)
        meeting: list[Entry] = []
        if model.interaction == DOT:
            pairs = {"batch": m, "dtype": self.work.dtype, "out_bytes": self.element}
            if which == "F":
                meeting = [Entry("interaction", "compute", Gemm(m=count, n=count, k=model.dim, **pairs), ())]
            else:
                meeting = [Entry("interaction", "compute", Gemm(m=count, n=model.dim, k=count, **pairs), ())]
            size = m * (count * count + width) * self.element
            meeting.append(Entry("pairs", "compute", Elementwise(num_bytes=size), ()))
        else:
            meeting = list(self._products(model.cross_products(count), m, which, first=True, activated=False))
            size = model.cross_layers * 4.0 * m * width * self.element * (1 if which == "F" else 2)
            meeting.append(Entry("cross", "compute", Elementwise(num_bytes=size, kernels=model.cross_layers), ()))
        entries = (*meeting, *top) if which == "F" else (*top, *meeting)
        return self.passed("interaction and top MLP", which, tuple(entries))

    def _products(self, sizes, m: int, which: str, *, first: bool, activated: bool = True) -> tuple[Entry, ...]:
        """Products of a chain and what follows each; backward the last one first, with both gradients of each, but
        none of the inputs of the first of all where nothing before it learns (``first`` False)."""
        out: list[Entry] = []
        chain = list(enumerate(sizes))
        for place, (k, n) in chain if which == "F" else reversed(chain):
            size = 2.0 * m * n * self.element
            dtype, element = self.work.dtype, self.element
            if which == "F":
                out.append(
                    Entry("product", "compute", Gemm(m=m, n=n, k=k, dtype=dtype, out_bytes=element, bias="added"), ())
                )
                out += [Entry("activation", "compute", Elementwise(num_bytes=size), ())] if activated else []
                continue
            out += [Entry("activation", "compute", Elementwise(num_bytes=1.5 * size), ())] if activated else []
            out.append(
                Entry("weights", "compute", Gemm(m=k, n=n, k=m, dtype=dtype, out_bytes=NUMBER, bias="summed"), ())
            )
            if place or first:
                out.append(Entry("inputs", "compute", Gemm(m=m, n=k, k=n, dtype=dtype, out_bytes=element), ()))
        return tuple(out)

    def sums(self) -> list[Program]:
        """The sums of gradients over replicas: of the interaction and the top MLP, then of the bottom MLP with the
        replicated tables, and of tower modules over their node."""
        low = sum(i * o + o for i, o in self.model.bottom_products())
        high = self.model.dense_params(self.features) - low
        alike = sum(t.num_params for t, item in zip(self.model.tables, self.placement.items) if item.way == REPLICATED)
        found = [self.exchanged("gradients of the top MLP", [Move("all_reduce", high * NUMBER, self.all)])]
        moves = [Move("all_reduce", low * NUMBER, self.all), Move("all_reduce", alike * NUMBER, self.all)]
        found.append(self.exchanged("gradients of the bottom MLP", moves))
        if self.module_params:
            moves = [Move("all_reduce", self.module_params * NUMBER, self.near)]
            found.append(self.exchanged("gradients of tower modules", moves))
        return found

    @property
    def dense_params(self) -> int:
        """Parameters of a rank outside of tables."""
        return self.model.dense_params(self.features) + self.module_params

    def optimizer(self) -> Program:
        """The update of dense layers and replicated tables: a gradient, a parameter and its state are read, the latter
        two written."""
        size = self.dense_params * (NUMBER + 2 * (NUMBER + STATE * self.work.dense_state))
        for table, item in zip(self.model.tables, self.placement.items):
            if item.way == REPLICATED:
                size += table.num_params * NUMBER + 2 * item.num_bytes
        return Program(kind="update", name="optimizer", site=self.site, work=Elementwise(num_bytes=size, fused=True))


def recommending_step(
    model: Recommender, plan: Plan, cluster: Cluster, work: SampleBatch, placement: TablePlacement
) -> RecommendingStep:
    """Lower a step of a legal plan with ``dp`` filled in, whose tables are placed."""
    step = _Step(model, plan, cluster, work, placement)
    groups: dict[RankTables, list[int]] = defaultdict(list)
    for rank, tables in enumerate(step.ranks):
        groups[tables].append(rank)
    classes = tuple(tuple(ranks) for ranks in groups.values())
    graph, programs = _graph(step, classes)
    crossing = [[r.width * float(work.batch) * step.pooled for r in step.ranks]]
    if step.towers:
        crossing = [[work.batch / placement.tower * left * step.pooled for left in step.left_widths]]
    return RecommendingStep(
        graph=graph,
        programs=tuple(programs),
        ranks=step.ranks,
        classes=classes,
        dense_params=step.dense_params,
        features=step.features,
        widest=sum(step.left_widths) if step.towers else step.tower_width(0),
        sent_far=max(crossing[0]) + (0.0 if step.towers else work.batch * step.row_width(0) * step.pooled),
        placement=placement,
    )


def _graph(step: _Step, classes: tuple[tuple[int, ...], ...]) -> tuple[TaskGraph, list[Program]]:
    """The tasks of a step on every class of ranks, and the programs that their cost keys number."""
    builder = GraphBuilder([RankClass(label=_named(ranks), multiplicity=len(ranks)) for ranks in classes])
    programs: list[Program] = []

    def key(program: Program) -> str:
        programs.append(program)
        return str(builder.key(str(len(programs) - 1)))  # numbered in the order in which programs are met

    def each(kind: str, make: Callable[[RankTables], Program], after: list[int]) -> list[int]:
        """One task on the compute queue of every class, behind collectives of all."""
        made = [make(step.ranks[ranks[0]]) for ranks in classes]
        keys = {program: key(program) for program in dict.fromkeys(made)}
        return [builder.add(kind, keys[program], builder.stream(c, "compute"), after) for c, program in enumerate(made)]

    def alike(kind: str, program: Program, after: list[int]) -> list[int]:
        """One task of the same work on the compute queue of every class."""
        return each(kind, lambda _: program, after)

    def together(kind: str, queue: str, program: Program, after: list[int]) -> list[int]:
        """One collective of all classes; nothing where it moves nothing."""
        if not program.moves:
            return after
        streams = [builder.stream(c, queue) for c in range(len(classes))]
        return [builder.add(kind, key(program), streams, after)]

    there, back = step.pooled_there(False), step.pooled_there(True)
    found = each("F", lambda r: step.memory_bound(LOOKUP, r.lookup), [])
    found = together("all_to_all", "ep", there[0], found)
    alike("F", step.bottom("F"), [])
    module = step.module("F")
    if module is not None:
        found = alike("F", module, found)
    for one in there[1:]:
        found = together("all_to_all", "ep", one, found)
    size, group = step.uneven([r.indices for r in step.ranks], step.all)
    together("all_to_all", "ep", step.exchanged("indices of the next step", [Move("all_to_all", size, group)]), found)
    alike("F", step.top("F"), found)
    late = alike("BW", step.top("BW"), [])
    sums = step.sums()
    top = together("all_reduce", "dp", sums[0], late)
    found = together("all_to_all", "ep", back[0], late)
    low = alike("BW", step.bottom("BW"), [])
    if step.ranks[0].gradient:
        low = alike("BW", step.memory_bound(GRADIENT, step.ranks[0].gradient), [])
    below = together("all_reduce", "dp", sums[1], low)
    waits = [*top, *below]
    if module is not None:
        backward = step.module("BW")
        found = alike("BW", backward, found)
        waits += together("all_reduce", "dp", sums[2], found)
    for one in back[1:]:
        found = together("all_to_all", "ep", one, found)
    each("optimizer", lambda r: step.memory_bound(ROW_UPDATE, r.update, "update"), found)
    alike("optimizer", step.optimizer(), waits)
    return builder.build(), programs


def _named(ranks: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 0-7`` or ``ranks 0, 2, 5 and 9 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"
