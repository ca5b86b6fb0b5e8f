"""An epoch of a graph network over a whole graph: its programs, and the graph of what waits for what.

A layer aggregates the numbers of every vertex's neighbours, a sparse product that is bound by memory: a row is read for
every edge and one is written for every vertex. Then it multiplies them with weights. Where vertices are divided over
devices (*graph parallelism*), those whose neighbours are elsewhere are exchanged before every layer, and gradients back
after it. Where layers are (GNNPipe, Chen et al., 2023, arXiv 2308.10087), chunks of the graph pass the stages in
the order of a pipeline schedule, and a boundary carries every vertex once a direction; neighbours in chunks that come
later are those of the epoch before. Both together: each stage's devices divide the vertices of every chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright import schedules
from meshwright.assign.cuts import blocks, copies_at_random, copies_of, skew_of
from meshwright.graph import GraphBuilder, RankClass, TaskGraph
from meshwright.lower.entry import Entry
from meshwright.lower.place import Mesh
from meshwright.lower.program import LayerPass, Move, Program, Site
from meshwright.plan.record import Plan
from meshwright.schedules.actions import F
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_files import read_edges
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GAT, GCNII, NUMBER, SAGE, GraphNetwork
from meshwright.work import Elementwise, Gemm

#: Bytes of a neighbour's number and of the weight of its edge.
INDEX, WEIGHT = 4.0, 4.0
#: fp32 numbers of a parameter with its gradient and the moments of Adam.
KEPT = 4
#: Widths of a layer that its forward leaves for the backward: what entered it, what was aggregated, what left it.
SAVED = 3.0


class NetworkEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """A lowered epoch: the ``graph``, whose cost keys are numbers of ``programs``; the ``cut`` of its vertices
    over the devices of a stage, ``layers`` of every stage, bytes that all devices send in the epoch between those that
    divide vertices (``boundary_bytes``) and between stages (``stage_bytes``), and of every stage's devices by kind."""

    graph: TaskGraph
    programs: tuple[Program, ...]
    cut: GraphCut
    layers: tuple[int, ...]
    boundary_bytes: float
    stage_bytes: float
    held: tuple[dict[str, float], ...]


class GraphCut(NamedTuple):
    """A cut of a graph: on how many other devices a vertex is needed, in the mean, and the edges of the device that has
    most of them over the mean."""

    copies: float
    skew: float


def cut_of(model: GraphNetwork, work: GraphEpochs, parts: int) -> GraphCut:
    """Return the cut of a graph whose vertices so many devices divide.

    Raises:
        MeshwrightError: D010 for a file of edges that cannot be read.
    """
    if parts == 1:
        return GraphCut(0.0, 1.0)
    if work.cut:
        edges, part_of = read_edges(work.cut, model.vertices), blocks(model.vertices, parts)
        both = edges.heads, edges.tails
        return GraphCut(copies_of(*both, part_of), skew_of(*both, part_of))
    copies = work.copies if work.copies >= 0 else copies_at_random(model.edges / model.vertices, parts)
    return GraphCut(min(copies, parts - 1.0), min(work.skew or 1.0, float(parts)))


def layers_of(model: GraphNetwork, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage: as many on all, and one more on the first where they do not divide."""
    less, more = divmod(model.layers, stages)
    return tuple(less + (stage < more) for stage in range(stages))


def sent_bytes(model: GraphNetwork, copies: float, stages: int) -> tuple[float, float]:
    """Return the bytes that all devices send in an epoch: of vertices that others need before every layer and of their
    gradients, and of chunks between stages and back."""
    both = 2 * model.vertices * model.hidden * NUMBER
    return both * copies * model.layers, both * model.streams * (stages - 1)


def layer_kernels(model: GraphNetwork, vertices: float, edges: float, which: str) -> tuple[Entry, ...]:
    """Return the kernels of a pass over one layer: forward its sparse product, its product and what follows; backward
    the gradients of both operands of the product and the sparse product along edges turned round."""
    wide, rows = model.hidden * NUMBER, max(1, round(vertices))
    gathered = Elementwise(num_bytes=edges * (wide + INDEX + WEIGHT) + vertices * wide, fused=True)
    inner = 2 * model.hidden if model.layer == SAGE else model.hidden
    sizes = {"dtype": "fp32", "out_bytes": NUMBER}
    # activation and dropout, with what GCNII adds of the first layer and of what entered
    each = {GCNII: 8.0}.get(model.layer, 4.0)
    out = [Entry("aggregation", "compute", gathered, ())]
    if model.layer == GAT:  # a score of each head for every edge: read twice for its softmax, written, weighed
        scores = 4 * edges * model.heads * NUMBER + 2 * vertices * wide
        out.insert(0, Entry("attention", "compute", Elementwise(num_bytes=scores, kernels=3), ()))
    if which == "F":
        out.append(Entry("product", "compute", Gemm(m=rows, n=model.hidden, k=inner, **sizes), ()))
        return (*out, Entry("activation", "compute", Elementwise(num_bytes=each * vertices * wide), ()))
    products = [Entry("inputs", "compute", Gemm(m=rows, n=inner, k=model.hidden, **sizes), ())]
    products.append(Entry("weights", "compute", Gemm(m=inner, n=model.hidden, k=rows, **sizes), ()))
    return (Entry("activation", "compute", Elementwise(num_bytes=1.5 * each * vertices * wide), ()), *products, *out)


class _Epoch:
    """The programs of an epoch and its tasks."""

    def __init__(self, model: GraphNetwork, plan: Plan, cluster: Cluster, work: GraphEpochs):
        self.model, self.plan, self.layout = model, plan, plan.layout
        self.mesh = Mesh(plan, cluster)
        self.site = Site(device=cluster.islands[0].device, num_ranks=self.layout.num_ranks)
        self.chunks = plan.vertices.vertex_chunks
        self.cut = cut_of(model, work, self.layout.dp)
        self.copies = self.cut.copies
        self.vertices = model.vertices / (self.layout.dp * self.chunks)
        self.edges = self.cut.skew * model.edges / (self.layout.dp * self.chunks)
        self.layers = layers_of(model, self.layout.pp)
        self.builder = GraphBuilder(
            [RankClass(label=f"stage {s}", stage=s, multiplicity=self.layout.dp) for s in range(self.layout.pp)]
        )
        self.numbers: dict[Program, int] = {}

    def key(self, program: Program) -> str:
        number = self.numbers.setdefault(program, len(self.numbers))
        return str(self.builder.key(str(number)))

    def passed(self, name: str, which: str, entries: tuple[Entry, ...]) -> Program:
        layers = (LayerPass(which=which, entries=entries),)
        return Program(kind="pass", name=name, site=self.site, which=which, layers=layers, share=0.0)

    def end(self, first: bool, which: str) -> Program:
        """The product in front of the layers, or that behind them with the loss."""
        model, rows = self.model, max(1, round(self.vertices))
        k, n = (model.features, model.hidden) if first else (model.hidden, model.classes)
        sizes = {"dtype": "fp32", "out_bytes": NUMBER}
        out = [Entry("product", "compute", Gemm(m=rows, n=n, k=k, **sizes), ())]
        if which == "BW":
            out = [Entry("weights", "compute", Gemm(m=k, n=n, k=rows, **sizes), ())]
            out += [] if first else [Entry("inputs", "compute", Gemm(m=rows, n=k, k=n, **sizes), ())]
        size = 4.0 * self.vertices * n * NUMBER
        out.append(Entry("activation" if first else "loss", "compute", Elementwise(num_bytes=size), ()))
        return self.passed("input" if first else "output", which, tuple(out))

    @property
    def exchanged_bytes(self) -> float:
        """Bytes that a device sends of a chunk's vertices to those that need them."""
        return self.vertices * self.copies * self.model.hidden * NUMBER

    @property
    def stage_message(self) -> float:
        """Bytes of a chunk's vertices that a device sends to the next stage."""
        return self.vertices * self.model.streams * self.model.hidden * NUMBER

    def exchanged(self, stage: int) -> Program:
        """Vertices on their way to devices that have neighbours of them, as an all-to-all."""
        dp = self.layout.dp
        group = self.mesh.group("dp", start=stage * self.layout.stride("pp"))
        moves = (Move("all_to_all", self.exchanged_bytes * dp / (dp - 1), group),)
        return Program(kind="exchange", name="boundary vertices", site=self.site, moves=moves)

    def sent(self, stage: int) -> Program:
        """A chunk on its way from a stage to the next one, or its gradients back."""
        stride = self.layout.stride("pp")
        pair = self.mesh.pair(stage * stride, (stage + 1) * stride)
        moves = (Move("send", self.stage_message, pair),)
        return Program(kind="send", name="chunk of vertices", site=self.site, moves=moves)

    def summed(self, stage: int) -> Program:
        """Gradients of a stage's weights over the devices that divide vertices."""
        group = self.mesh.group("dp", start=stage * self.layout.stride("pp"))
        moves = (Move("all_reduce", self.params(stage) * NUMBER, group),)
        return Program(kind="exchange", name="gradients of weights", site=self.site, moves=moves)

    def updated(self, stage: int) -> Program:
        """Adam's update of a stage's weights: a gradient read, parameter and moments read and written."""
        work = Elementwise(num_bytes=7 * self.params(stage) * NUMBER, fused=True)
        return Program(kind="update", name="weights", site=self.site, work=work)

    def params(self, stage: int) -> int:
        """Parameters of a stage."""
        front, behind = self.model.end_params
        count = self.layers[stage] * self.model.layer_params
        return count + front * (stage == 0) + behind * (stage == self.layout.pp - 1)

    def passing(self, stage: int, which: str, after: list[int]) -> int:
        """The tasks of a chunk's pass of a stage, one layer after the other; the last one."""
        builder, compute = self.builder, self.builder.stream(stage, "compute")
        first, last = stage == 0, stage == self.layout.pp - 1
        body = self.passed("layer", which, layer_kernels(self.model, self.vertices, self.edges, which))
        task = None

        def add(kind: str, program: Program, stream: int) -> None:
            nonlocal task
            task = builder.add(kind, self.key(program), stream, after if task is None else [task])

        if which == "F" and first:
            add("F", self.end(True, "F"), compute)
        if which == "BW" and last:
            add("BW", self.end(False, "BW"), compute)
        for _ in range(self.layers[stage]):
            if which == "F" and self.layout.dp > 1:
                add("all_to_all", self.exchanged(stage), builder.stream(stage, "ep"))
            add(which, body, compute)
            if which == "BW" and self.layout.dp > 1:
                add("all_to_all", self.exchanged(stage), builder.stream(stage, "ep"))
        if which == "F" and last:
            add("F", self.end(False, "F"), compute)
        if which == "BW" and first:
            add("BW", self.end(True, "BW"), compute)
        assert task is not None
        return task

    def lowered(self) -> NetworkEpoch:
        """All tasks, in an order in which whatever is waited for comes first."""
        builder, pp = self.builder, self.layout.pp
        orders: list[list[tuple[str, int]]] = [[("F", 0), ("BW", 0)]]
        if pp > 1:
            actions = schedules.build(self.plan.pipeline.schedule, pp, self.chunks)
            kinds = [("F" if kind == F else "BW", int(mb)) for kind, mb in zip(actions.kind, actions.microbatch)]
            orders = [kinds[actions.rank_ptr[s] : actions.rank_ptr[s + 1]] for s in range(pp)]
        done: dict[tuple[str, int, int], int] = {}  # the send, or the last task, of a pass of a stage and a chunk
        at, ends = [0] * pp, [0] * pp
        while any(at[s] < len(orders[s]) for s in range(pp)):
            moved = False
            for stage in range(pp):
                while at[stage] < len(orders[stage]):
                    which, chunk = orders[stage][at[stage]]
                    before = stage - 1 if which == "F" else stage + 1
                    waits = [done[which, before, chunk]] if (which, before, chunk) in done else []
                    if 0 <= before < pp and not waits:
                        break
                    if which == "BW" and stage == pp - 1:
                        waits = [done["F", stage, chunk]]
                    ends[stage] = task = self.passing(stage, which, waits)
                    to = stage + 1 if which == "F" else stage - 1
                    if 0 <= to < pp:
                        queue = "pp_forward" if which == "F" else "pp_backward"
                        program = self.sent(min(stage, to))
                        task = builder.add("send", self.key(program), builder.stream(stage, queue), [task])
                    done[which, stage, chunk] = task
                    at[stage] += 1
                    moved = True
            assert moved
        for stage in range(pp):
            last = [ends[stage]]
            if self.layout.dp > 1:
                last = [builder.add("all_reduce", self.key(self.summed(stage)), builder.stream(stage, "dp"), last)]
            builder.add("optimizer", self.key(self.updated(stage)), builder.stream(stage, "compute"), last)
        boundary, between = sent_bytes(self.model, self.copies, pp)
        return NetworkEpoch(
            graph=builder.build(),
            programs=tuple(self.numbers),
            cut=self.cut,
            layers=self.layers,
            boundary_bytes=boundary,
            stage_bytes=between,
            held=tuple(self.held(stage) for stage in range(pp)),
        )

    def held(self, stage: int) -> dict[str, float]:
        """Bytes of a stage's devices by kind: of all its vertices what its layers leave for the backward, vertices of
        others, historical ones of the epoch before, edges both ways, and weights with gradients and moments."""
        model, dp = self.model, self.layout.dp
        mine, wide = model.vertices / dp, model.hidden * NUMBER
        found = {"weights": self.params(stage) * KEPT * NUMBER}
        found["activations"] = self.layers[stage] * SAVED * mine * wide
        found["features"] = mine * model.features * NUMBER if stage == 0 else 0.0
        found["edges"] = 2 * (self.cut.skew * model.edges / dp * (INDEX + WEIGHT) + mine * INDEX)
        found["boundary vertices"] = 2 * mine * self.copies * wide
        if self.chunks > 1:
            found["historical vertices"] = self.layers[stage] * mine * wide
        return {name: size for name, size in found.items() if size}


def network_epoch(model: GraphNetwork, plan: Plan, cluster: Cluster, work: GraphEpochs) -> NetworkEpoch:
    """Lower an epoch of a legal plan with ``dp`` filled in."""
    return _Epoch(model, plan, cluster, work).lowered()
