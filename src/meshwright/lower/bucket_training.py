"""Passes over all buckets of a graph's edges: their programs, and the graph of what waits for what.

A device trains a bucket once its two partitions are there, which lie on the host, on drives or with other machines
meanwhile, and stores what its next bucket does not need. A partition that another device has trained is loaded once it
is stored. With ``swap=beside`` the next bucket's partitions are loaded while this one is trained. On a grid all devices
end an episode before any begins the next one. Where samples are made by walks, processor threads make those of the next
pass beside this one, into the second of two pools (Zhu et al., 2019, arXiv 1903.00757, section 3.3).
"""

from __future__ import annotations

from math import ceil

import msgspec
import numpy as np

from meshwright.assign.buckets import Round, Stay, grid, locked, moved, needed, stays, tournament
from meshwright.graph import GraphBuilder, RankClass, TaskGraph
from meshwright.lower.entry import Entry
from meshwright.lower.place import Mesh
from meshwright.lower.program import LayerPass, Move, Program, Site
from meshwright.lower.tier_sizes import COPY_US, DRIVE_US, rate_gb_s
from meshwright.plan.bucket_rules import idle_of, is_host
from meshwright.plan.facets.buckets import BESIDE, GRID, HOST, NVME, PEERS, TOURNAMENT
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NUMBER, NodeEmbedding
from meshwright.work import Elementwise, Gemm, TierCopy

#: Bytes of the number of a node in its partition, or of a relation, and of a line of the host's caches.
INDEX, LINE = 4.0, 64.0
#: Reads of a walk's step of which each has to wait for the one before: where the row of a node begins, the entry of its
#: alias table, the neighbour that this names.
WALK_READS = 3
#: A read of the host's memory that no cache has, nanoseconds (two sockets, local memory; Intel's Memory Latency Checker
#: says 80 to 100 on such servers: from memory, not read).
READ_NS = 90.0
#: Passes that are timed: the first, one after which all is as before, and one more.
PASSES = 3
#: Names of programs, by which an attribution tells them apart.
TRAINED, MADE = "samples of a bucket", "samples by walks"


class BucketTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Lowered passes: the ``graph``, whose cost keys are numbers of ``programs``, each of which is done ``repeats``
    times or takes so many ``seconds`` (-1: as it is priced). ``rounds`` are those of one pass, ``stays`` what machines
    train, load and store in all of them, ``samples`` of one bucket; ``last`` are the tasks that end each pass.
    ``item_bytes`` is a partition with its optimizer state, ``moved_bytes`` what all devices load and store in the last
    pass but what is at its place already, ``held`` bytes of a device by kind, ``host`` those of a host."""

    graph: TaskGraph
    programs: tuple[Program, ...]
    repeats: np.ndarray
    seconds: np.ndarray
    rounds: tuple[Round, ...]
    stays: tuple[tuple[Stay, ...], ...]
    samples: float
    last: tuple[tuple[int, ...], ...]
    item_bytes: float
    moved_bytes: float
    held: dict[str, float]
    host: dict[str, float]


def row_bytes(model: NodeEmbedding, work: EdgeSamples, rows: float) -> float:
    """Return the bytes of so many rows with their optimizer state."""
    return rows * NUMBER * (model.dim + work.row_state + work.number_state * model.dim)


def partition_bytes(model: NodeEmbedding, work: EdgeSamples, partitions: int) -> float:
    """Return the bytes of one partition of one table, as it is loaded and stored, with its optimizer state."""
    return row_bytes(model, work, ceil(model.nodes / partitions))


def rounds_of(model: NodeEmbedding, plan: Plan) -> tuple[Round, ...]:
    """Return what devices train in the rounds of one pass."""
    said, devices = plan.buckets, plan.layout.dp
    if said.way == GRID:
        return grid(said.partitions, devices)
    if said.way == TOURNAMENT:
        return tournament(said.partitions, devices)
    return locked(said.partitions, devices, model.context)


def kernels(model: NodeEmbedding, work: EdgeSamples, batch: float) -> tuple[Entry, ...]:
    """Return the kernels that train so many samples. With negatives of its own a sample's rows are read, and written
    with what changes them, in one kernel that keeps them in registers. With shared ones rows are gathered first, ends
    of edges are multiplied with them, and gradients are gathered from products and added to the rows."""
    row, state = model.dim * NUMBER, NUMBER * (work.row_state + work.number_state * model.dim)
    if work.shared == 1:
        rows = batch * (2 + work.negatives * model.sides)
        moved = Elementwise(num_bytes=rows * (INDEX + 2 * (row + state)), fused=True, operator=TRAINED)
        return (Entry("samples", "compute", moved, ()),)
    chunks = max(1, round(batch / work.shared))
    rows = 2 * batch + model.sides * chunks * work.uniform
    out = [Entry("gather", "compute", Elementwise(num_bytes=rows * (INDEX + 2 * row), fused=True), ())]
    if model.relations:
        out.append(Entry("relations", "compute", Elementwise(num_bytes=9 * batch * row, fused=True), ()))
    sizes = {"m": work.shared, "n": work.negatives, "k": model.dim}
    products = [sizes, {"m": work.shared, "n": model.dim, "k": work.negatives}]
    products.append({"m": work.negatives, "n": model.dim, "k": work.shared})
    for side in range(model.sides):
        for one in products:
            product = Gemm(**one, batch=chunks, dtype="fp32", out_bytes=NUMBER)
            out.append(Entry(f"scores {side}", "compute", product, ()))
    scores = 4 * model.sides * batch * work.negatives * NUMBER
    out.append(Entry("loss", "compute", Elementwise(num_bytes=scores, fused=True), ()))
    update = rows * (INDEX + row + 2 * (row + state))
    return (*out, Entry("update", "compute", Elementwise(num_bytes=update, fused=True), ()))


class _Passes:
    """Tasks of :data:`PASSES` passes, added machine by machine in the order of rounds."""

    def __init__(self, model: NodeEmbedding, plan: Plan, cluster: Cluster, work: EdgeSamples):
        self.model, self.plan, self.cluster, self.work = model, plan, cluster, work
        self.said, self.devices = plan.buckets, plan.layout.dp
        self.mesh = Mesh(plan, cluster)
        self.node, self.device = cluster.islands[0].node, cluster.islands[0].device
        self.site = Site(device=self.device, num_ranks=self.devices)
        self.near = min(self.node.devices, self.devices)
        self.idle = idle_of(plan, cluster)
        #: Whether edges are read from drives, batch by batch: else processors have those of a bucket in memory.
        self.read = is_host(self.device) and self.node.nvme_gb_s > 0 and not work.walk
        self.rounds = rounds_of(model, plan)
        self.stays = stays(self.rounds * PASSES, self.said.partitions, model.context)
        self.samples = self.said.episode or model.edges / self.said.partitions**2
        self.item = partition_bytes(model, work, self.said.partitions)
        names = [f"device {one}" for one in range(self.devices)]
        self.builder = GraphBuilder([*(RankClass(label=name) for name in names), RankClass(label="host threads")])
        self.numbers: dict[Program, int] = {}
        self.repeats: dict[int, float] = {}
        self.seconds: dict[int, float] = {}

    # -- programs -----------------------------------------------------------------------------------------------------

    def key(self, program: Program) -> str:
        number = self.numbers.setdefault(program, len(self.numbers))
        return str(self.builder.key(str(number)))

    def training(self) -> Program:
        """All samples of a bucket, one batch after the other."""
        batch = min(float(self.work.batch), max(1.0, self.samples))
        layers = (LayerPass(which="BW", entries=kernels(self.model, self.work, batch)),)
        program = Program(kind="pass", name=TRAINED, site=self.site, which="BW", layers=layers, share=0.0)
        self.key(program)
        number = self.numbers[program]
        self.repeats[number] = max(1.0, self.samples / batch)
        if self.work.rate:
            self.seconds[number] = self.samples / self.work.rate
        return program

    def copied(self, name: str, size: float, way: str) -> Program:
        """A transfer between tiers."""
        latency = COPY_US if way in ("h2d", "d2h") else DRIVE_US
        work = TierCopy(num_bytes=size, gb_s=rate_gb_s(self.node, self.near, way), latency_us=latency, way=way)
        return Program(kind="transfer", name=name, site=self.site, work=work)

    def sent(self) -> Program:
        """A partition on its way between two machines."""
        far = self.mesh.pair(0, self.near if self.devices > self.near else 1)
        return Program(kind="send", name="partition", site=self.site, moves=(Move("send", self.item, far),))

    def made(self) -> Program:
        """The samples of a pass that the threads of a host make: each step of a walk is some reads of memory, one
        after the other, and a sample is written to a place of its own."""
        hosts = self.devices // self.near
        samples = self.samples * self.said.partitions**2 / hosts
        threads = self.said.samplers or max(1, (self.node.cpus or 2 * self.near) - self.near)
        steps = samples * self.work.steps_a_sample
        alone = steps * WALK_READS * READ_NS * 1e-9 / threads
        size = steps * WALK_READS * LINE + samples * 2 * LINE
        seconds = max(alone, size / (self.node.streamed_gb_s * 1e9))
        work = TierCopy(num_bytes=size, gb_s=size / seconds / 1e9, latency_us=0.0, way="host")
        return Program(kind="transfer", name=MADE, site=self.site, work=work)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def swapped(self, machine: int, item: int, store: bool, after: list[int]) -> int | None:
        """A partition that is loaded or stored; None where that is no transfer."""
        add, stream = self.builder.add, self.builder.stream
        if self.said.partitions == 1 and self.devices == 1 and is_host(self.device):
            return None
        if self.idle == PEERS:
            if item % self.devices == machine:  # it has the partition in its own memory
                return None
            queue = "link_backward" if store else "link_forward"
            return add("send", self.key(self.sent()), stream(machine, queue), after)
        if self.idle == HOST or is_host(self.device):
            ways = {HOST: ("h2d", "d2h"), NVME: ("nvme_read", "nvme_write")}[self.idle]
            queue = ("d2h" if store else "h2d") if self.idle == HOST else "nvme"
            name = "partition stored" if store else "partition loaded"
            return add("copy", self.key(self.copied(name, self.item, ways[store])), stream(machine, queue), after)
        order = [("d2h", "d2h"), ("nvme_write", "nvme")] if store else [("nvme_read", "nvme"), ("h2d", "h2d")]
        task = None
        for way, queue in order:
            key = self.key(self.copied("partition", self.item, way))
            task = add("copy", key, stream(machine, queue), after if task is None else [task])
        return task

    def loaded(self, machine: int, item: int, room: list[int], stored: dict[int, int]) -> list[int]:
        """The tasks behind which a partition is there: its transfer, or what that would wait for."""
        after = [*room, *([stored[item]] if item in stored else [])]
        task = self.swapped(machine, item, False, after)
        return after if task is None else [task]

    def fed(self, machine: int, after: list[int]) -> int | None:
        """Samples of a bucket on their way to an accelerator, or from the drives of a processor that has some."""
        if is_host(self.device) and not self.read:
            return None
        size = self.samples * INDEX * (2 + bool(self.model.relations))
        key = self.key(self.copied("samples", size, "nvme_read" if self.read else "h2d"))
        return self.builder.add("copy", key, self.builder.stream(machine, "copy"), after)

    def lowered(self) -> BucketTraining:
        """All tasks, round by round."""
        builder, training = self.builder, self.training()
        count = len(self.rounds)
        due = [iter(one) for one in self.stays]
        ahead = [next(one, None) for one in due]
        stored: dict[int, int] = {}  # what is needed -> the task that stored it last
        trains: list[list[int]] = [[] for _ in range(self.devices)]
        behind: list[list[int]] = [[] for _ in range(self.devices)]  # what each machine's last bucket stored
        earlier: list[list[int]] = [[] for _ in range(self.devices)]
        early: list[dict[int, list[int]]] = [{} for _ in range(self.devices)]  # loads that were begun in time
        fed: list[int | None] = [None] * self.devices
        ends: list[list[int]] = []
        pools: list[int] = []
        barrier: list[int] = []
        for number in range(count * PASSES):
            if number % count == 0:
                ends.append([])
                if self.work.walk:
                    waits = ends[-3] if len(ends) > 2 else []  # its pool is the one of two passes before
                    host = builder.stream(self.devices, "host")
                    pools.append(builder.add("host", self.key(self.made()), host, waits))
            now: list[int] = []
            leaving: list[tuple[int, Stay, int]] = []
            for machine in range(self.devices):
                stay = ahead[machine]
                if stay is None or stay.round != number:
                    continue
                ahead[machine] = next(due[machine], None)
                mine = trains[machine]
                if self.said.swap == BESIDE:
                    room = [*mine[-2:-1], *earlier[machine]]
                else:
                    room = [*mine[-1:], *behind[machine]]
                loads: list[int] = []
                for item in stay.loads:
                    loads += early[machine].pop(item, None) or self.loaded(machine, item, room, stored)
                waits = [*loads, *barrier, *pools[-1:], *([fed[machine]] if fed[machine] is not None else [])]
                stream = builder.stream(machine, "compute")
                task = builder.add("BW", self.key(training), stream, dict.fromkeys(waits), step=number // count)
                fed[machine] = self.fed(machine, [*mine[-1:], *pools[-1:]])
                mine.append(task)
                now.append(task)
                ends[-1].append(task)
                leaving.append((machine, stay, task))
            gone = {item for _, stay, _ in leaving for item in stay.stores}
            for machine, _, _ in leaving if self.said.swap == BESIDE else ():
                following = ahead[machine]  # ahead of what is stored, as drives read and write in turn
                if following is not None and following.round == number + 1:
                    room = [*trains[machine][-2:-1], *behind[machine]]
                    for item in (item for item in following.loads if item not in gone):
                        early[machine][item] = self.loaded(machine, item, room, stored)
            for machine, stay, task in leaving:
                earlier[machine], behind[machine] = behind[machine], []
                for item in stay.stores:
                    one = self.swapped(machine, item, True, [task])
                    stored[item] = task if one is None else one
                    behind[machine].append(stored[item])
            if self.said.way == GRID:
                barrier = now
        total = len(self.numbers)
        return BucketTraining(
            graph=builder.build(),
            programs=tuple(self.numbers),
            repeats=np.array([self.repeats.get(i, 1.0) for i in range(total)]),
            seconds=np.array([self.seconds.get(i, -1.0) for i in range(total)]),
            rounds=self.rounds,
            stays=self.stays,
            samples=self.samples,
            last=tuple(tuple(one) for one in ends),
            item_bytes=self.item,
            moved_bytes=self.item * moved(self.stays, len(self.rounds) * (PASSES - 1), peers=self.idle == PEERS),
            held=self.held(),
            host=self.host(),
        )

    # -- memory -------------------------------------------------------------------------------------------------------

    def most(self) -> int:
        """Partitions that a device has room for."""
        most = 0
        for mine in self.stays:
            held: set[int] = set()
            for place, stay in enumerate(mine):
                held |= set(stay.loads)
                held |= needed(stay.bucket, self.said.partitions, self.model.context)
                following = mine[place + 1].loads if place + 1 < len(mine) else ()
                most = max(most, len(held | set(following)) if self.said.swap == BESIDE else len(held))
                held -= set(stay.stores)
        return most

    def held(self) -> dict[str, float]:
        """Bytes of a device by kind."""
        model, work = self.model, self.work
        batch = min(float(work.batch), max(1.0, self.samples))
        edge = INDEX * (2 + bool(model.relations))
        found = {"partitions": self.most() * self.item}
        if self.idle == PEERS and self.said.partitions > 1:
            found["partitions of others"] = ceil(model.tables * self.said.partitions / self.devices) * self.item
        found["samples"] = (self.samples if is_host(self.device) and not self.read else 2 * batch) * edge
        if work.shared > 1:
            rows = 2 * batch + model.sides * batch / work.shared * work.uniform
            scores = model.sides * batch * work.negatives * NUMBER
            found["gathered rows and scores"] = 2 * rows * model.dim * NUMBER + 2 * scores
        if model.relations:
            found["relations"] = row_bytes(model, work, model.relations)
        return found

    def host(self) -> dict[str, float]:
        """Bytes of a host by kind, beside what devices hold; nothing where devices are processors."""
        if is_host(self.device):
            return {}
        model, pools = self.model, 2 if self.work.walk else 1
        found = {"samples": pools * self.said.partitions**2 * self.samples * INDEX * (2 + bool(model.relations))}
        if self.idle == HOST:
            found["partitions"] = model.tables * self.said.partitions * self.item
        if self.work.walk:  # neighbours both ways, each with an entry of an alias table
            found["graph"] = 2 * model.edges * (INDEX + 2 * INDEX)
        return found


def bucket_training(model: NodeEmbedding, plan: Plan, cluster: Cluster, work: EdgeSamples) -> BucketTraining:
    """Lower passes of a legal plan with ``dp`` filled in."""
    return _Passes(model, plan, cluster, work).lowered()
