"""A step whose exchanges share ports: the same graph on the event engine, passes cut at the exchanges inside them.

The in-order engine lets every queue of a rank move its bytes at the port's full rate, which is right as long as two
of them are never busy at once. Here a collective is a flow over the ports of its ranks at its outermost level, out and
in, and flows that meet on a port share it max-min fairly. Sharded parameters gathered while gradients are reduced,
activations sent against gradients, or a ring inside a layer beside the reduction of another are what differs.

Where a plan says ``yield_mb=`` sums of gradients let experts' tokens pass (Lina, Li et al. 2210.17223): they are cut
into pieces, and a piece and an exchange of tokens have a port one after the other, tokens first whenever both wait.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.graph import KIND, KINDS, QUEUES, GraphBuilder
from meshwright.lower import Lowered
from meshwright.lower.program import Move, Program
from meshwright.simulate import events
from meshwright.simulate.engine import Times
from meshwright.simulate.price import Pricer
from meshwright.spec.hardware import Device
from meshwright.work import Collective

#: Queues of a rank's exchanges where two are under way together; no task of a step runs on the second by itself.
LANES = ("dp", "host")
#: The same of messages to neighbours, which are all sent at once; as many as there are queues to spare.
MESSAGE_LANES = ("dp", "host", "link_forward", "link_backward")
#: A message so short that its price is its latency, and one so long that its price is its bytes'.
NO_BYTES, MANY_BYTES = 1e-3, 2.0**30
#: The queue of exchanges that pieces of others let pass, and the one that every port has.
FIRST, TURN = "ep", "dp"


class PassPart(msgspec.Struct):
    """A part of a pass: a stretch of kernels (``work`` None) or one collective, after other parts."""

    queue: str
    seconds: float
    work: Collective | None
    after: list[int]


def cut(costs: Costs, program: Program) -> list[PassPart]:
    """A pass as stretches of kernels and the collectives between and beside them, layer by layer. One without
    collectives is one stretch."""
    nodes: list[PassPart] = []
    ends: list[int] = []
    device, lag = program.site.device, program.site.straggling
    before: list[int] = []
    for layer in program.layers:
        entries = layer.entries
        feeds_comm = {a for e in entries if e.queue != "compute" for a in e.after}
        at: list[int] = []
        stretch = -1  # the node that a kernel may join
        for number, entry in enumerate(entries):
            after = [at[a] for a in entry.after] + [before[a] for a in entry.late if a < len(before)] or list(ends)
            if entry.queue != "compute":
                nodes.append(PassPart(entry.queue, 0.0, entry.work, after))
                at.append(len(nodes) - 1)
                continue
            seconds = float(costs.price(entry.work, device).seconds) * lag
            waits = [a for a in after if nodes[a].work is not None]
            if stretch >= 0 and all(a < stretch for a in waits) and set(waits) <= set(nodes[stretch].after):
                nodes[stretch].seconds += seconds
            else:
                nodes.append(PassPart("compute", seconds, None, after))
                stretch = len(nodes) - 1
            at.append(stretch)
            if number in feeds_comm:
                stretch = -1
        if at:
            used = {a for n in set(at) for a in nodes[n].after}
            ends = sorted(set(at) - used)
        before = at if any(entry.late for entry in entries) else []
    if any(node.work is not None for node in nodes):
        return nodes
    return [PassPart("compute", sum(node.seconds for node in nodes), None, [])]


def times(lowered: Lowered, costs: Costs, *, inside: bool = True) -> Times:
    """Start and end in seconds [N] of every task of the lowered graph when its exchanges share the ports they use.

    With `inside` the exchanges inside passes count too, which costs minutes for tens of thousands of passes; without,
    only those of the step graph.
    """
    return _Shared(lowered, costs, inside=inside).times()


class _Shared:
    """Builds the graph of parts and its flows."""

    def __init__(self, lowered: Lowered, costs: Costs, *, inside: bool):
        self.lowered, self.costs, self.graph, self.inside = lowered, costs, lowered.graph, inside
        self.durations = Pricer(costs).all(lowered.programs).durations
        ranks = self.graph.streams.ranks
        #: Whether pieces of some exchanges let others pass, and the levels whose ports they then have in turns.
        self.yields = any(program.yields for program in lowered.programs)
        names = {level.name for island in lowered.mesh.cluster.islands for level in island.levels}
        self.levels = sorted(names) if self.yields else []
        places = [f"{rank.name} on {level}" for rank in ranks for level in self.levels]
        self.builder = GraphBuilder((*ranks, *places))
        self.first: list[int] = []  # tasks that go before others which wait for the same port
        self.seconds: list[float] = []
        self.flows: dict[int, tuple[float, list[int]]] = {}
        self.ports: dict[tuple[int, str, str], int] = {}
        self.capacity: list[float] = []  # of every link: whole ports, and the pace of an exchange
        #: Whether exchanges wait between their messages and others use the port meanwhile.
        self.paced = costs.framework.exchanges_at_once > 1
        self.parts: dict[int, list[PassPart]] = {}
        self.turn = 0

    def times(self) -> Times:
        g, done, before = self.graph, {}, {}
        first = {}
        targets = self._targets()
        for i in range(g.num_tasks):
            streams = g.member[g.member_ptr[i] : g.member_ptr[i + 1]]
            places = [(int(g.streams.rank[s]), QUEUES[g.streams.queue[s]]) for s in streams]
            if self.paced:
                lanes = MESSAGE_LANES if KINDS[g.kind[i]] == "neighbours" else LANES
                places = self._in_turn(places, lanes, exchanged=int(g.attribute("layer")[i]) >= 0)
            edges = slice(g.dep_ptr[i], g.dep_ptr[i + 1])  # what an earlier step sent is there
            after = [t for d in g.dep[edges][g.dep_lag[edges] == 0].tolist() for t in done[d]]
            after += [t for place in places if place[1] == "compute" for t in before.get(place[0], ())]
            program = self.lowered.programs[g.cost_key[i]]
            kind = KINDS[g.kind[i]]
            if program.yields and self._level(program):
                first[i], done[i] = self._pieces(kind, places, program, after, int(g.cost_key[i]))
            elif program.kind == "pass":
                first[i], done[i] = self._pass(kind, places[0][0], program, int(g.cost_key[i]), after)
            else:
                name, ends = self._level(program), [rank for rank, _ in places]
                task = self._add(kind, places, after, float(self.durations[g.cost_key[i]]))
                if name and self.paced:
                    crossed = [(r, "out") for r in ends] + [(r, "in") for r in targets.get(i, ends)]
                    self._pace(task, self._wire(program), crossed, name)
                elif name:
                    crossed = [(r, "out") for r in ends] + [(r, "in") for r in targets.get(i, ends)]
                    self._flow(task, self._latency(program), crossed, name)
                first[i], done[i] = [task], [task]
            if places[0][1] == "compute":
                before[places[0][0]] = done[i]
        graph = self.builder.build()
        position = np.empty(graph.num_tasks, np.int64)
        position[graph.cost_key] = np.arange(graph.num_tasks)  # every part has a key of its own
        transfers = events.Transfers.of(
            graph.num_tasks,
            self.capacity,
            {int(position[task]): flow for task, flow in self.flows.items()},
        )
        asked = {}
        if self.yields:
            priority = np.zeros(graph.num_tasks)
            priority[position[self.first]] = 1.0
            turns = graph.streams.rank >= len(g.streams.ranks)
            asked = {"policies": np.where(turns, "priority", "in_order").tolist(), "priority": priority}
        start, end = events.times(graph, np.array(self.seconds), transfers=transfers, **asked)
        starts = np.array([min(start[position[t]] for t in first[i]) for i in range(g.num_tasks)])
        return starts, np.array([max(end[position[t]] for t in done[i]) for i in range(g.num_tasks)])

    def _pieces(
        self, kind: str, places: list[tuple[int, str]], program: Program, after: list[int], number: int
    ) -> tuple[list[int], list[int]]:
        """An exchange in equal pieces, one after the other, each of which holds its ranks' ports meanwhile; the
        first and the last of them."""
        count, level = max(move.times for move in program.moves), self._level(program)
        held = [*places, *((self._turn(rank, level), TURN) for rank, _ in places)]
        crossed = [(rank, way) for rank, _ in places for way in ("out", "in")]
        made: list[int] = []
        for _ in range(count):
            made.append(self._add(kind, held, made[-1:] or after, float(self.durations[number]) / count))
            if self.paced:
                self._pace(made[-1], self._wire(program) / count, crossed, level)
            else:
                self._flow(made[-1], self._latency(program), crossed, level)
        return made[:1], made[-1:]

    def _turn(self, rank: int, level: str) -> int:
        """The place at which exchanges have a rank's port on a level one after the other."""
        return len(self.graph.streams.ranks) + rank * len(self.levels) + self.levels.index(level)

    def _in_turn(
        self, places: list[tuple[int, str]], lanes: tuple[str, ...], *, exchanged: bool
    ) -> list[tuple[int, str]]:
        """Where an exchange runs when several are under way together: those of layers (`exchanged`) take turns on the
        queues `lanes`; a number that all wait for comes after them."""
        if any(queue != "dp" for _, queue in places):
            return places
        if not exchanged:
            return [(rank, queue) for rank, _ in places for queue in lanes]
        self.turn += 1
        return [(rank, lanes[self.turn % len(lanes)]) for rank, _ in places]

    def _targets(self) -> dict[int, list[int]]:
        """Who receives each send: its rank class."""
        g = self.graph
        stage, microbatch = g.attribute("stage").tolist(), g.attribute("microbatch").tolist()
        own = [int(g.streams.rank[g.member[p]]) for p in g.member_ptr[:-1]]
        pp = self.lowered.mesh.layout.pp
        home = {(own[i] // pp, stage[i], microbatch[i]): own[i] for i in np.flatnonzero(g.kind == KIND["F"]).tolist()}
        out = {}
        for i in np.flatnonzero(g.kind == KIND["send"]).tolist():
            forward = QUEUES[g.streams.queue[g.member[g.member_ptr[i]]]] == "pp_forward"
            out[i] = [home[own[i] // pp, stage[i] + (1 if forward else -1), microbatch[i]]]
        return out

    def _add(self, kind: str, places: list[tuple[int, str]], after: list[int], seconds: float) -> int:
        streams = [self.builder.stream(rank, queue) for rank, queue in places]
        self.seconds.append(seconds)
        return self.builder.add(kind, str(len(self.seconds)), streams, after)

    def _flow(self, task: int, latency: float, crossed: list[tuple[int, str]], level: str) -> None:
        """Turn a task into a latency and a flow of the rest over ports."""
        latency = min(latency, self.seconds[task])
        self.flows[task] = (self.seconds[task] - latency, self._links(crossed, level))
        self.seconds[task] = latency

    def _pace(self, task: int, wire: float, crossed: list[tuple[int, str]], level: str) -> None:
        """Turn a task into a flow of `wire` seconds over ports that alone takes as long as the task: between its
        messages it waits."""
        wire = min(wire, self.seconds[task])
        if wire > 0:
            links = self._links(crossed, level)
            self.capacity.append(wire / self.seconds[task])
            self.flows[task] = (wire, [*links, len(self.capacity) - 1])
            self.seconds[task] = 0.0

    def _links(self, crossed: list[tuple[int, str]], level: str) -> list[int]:
        """Return the links of ports of ranks, each of the capacity that its exchanges are priced with."""
        for rank, way in crossed:
            if (rank, way, level) not in self.ports:
                self.ports[rank, way, level] = len(self.capacity)
                self.capacity.append(1.0)
        return [self.ports[rank, way, level] for rank, way in crossed]

    def _parts(self, program: Program, number: int) -> list[PassPart]:
        """A pass cut at its exchanges. What it takes beyond them (a host that issues too slowly, kernels that lose SMs)
        comes at its end."""
        known = self.parts.get(number)
        if known is None and not self.inside:
            known = self.parts[number] = [PassPart("compute", float(self.durations[number]), None, [])]
        if known is None:
            known = self.parts[number] = cut(self.costs, program)
            rest = float(self.durations[number]) - self._alone(known, program.site.device)
            if len(known) > 1 and rest > 0:
                known.append(PassPart("compute", rest, None, list(range(len(known)))))
        return known

    def _alone(self, nodes: list[PassPart], device: Device) -> float:
        """Seconds of a pass's parts when nothing else uses the ports."""
        free: dict[str, float] = {}
        ends: list[float] = []
        for node in nodes:
            seconds = node.seconds if node.work is None else self.costs.price(node.work, device).seconds
            ends.append(max([free.get(node.queue, 0.0), *(ends[a] for a in node.after)]) + seconds)
            free[node.queue] = ends[-1]
        return max(ends)

    def _pass(
        self, kind: str, rank: int, program: Program, number: int, after: list[int]
    ) -> tuple[list[int], list[int]]:
        device, at = program.site.device, []
        nodes = self._parts(program, number)
        if len(nodes) == 1:
            task = self._add(kind, [(rank, "compute")], after, float(self.durations[number]))
            return [task], [task]
        for node in nodes:
            waits = [at[a] for a in node.after] if node.after else after
            if node.work is None:
                at.append(self._add(kind, [(rank, "compute")], waits, node.seconds))
                continue
            level = node.work.group.hops[-1].name if node.work.group.size > 1 else ""
            turns = [(self._turn(rank, level), TURN)] if level in self.levels and node.queue == FIRST else []
            seconds = self.costs.price(node.work, device).seconds
            at.append(self._add("op", [(rank, node.queue), *turns], waits, seconds))
            self.first += at[-1:] if turns else []
            if level:
                self._flow(at[-1], self._empty(node.work), [(rank, "out"), (rank, "in")], level)
        used = {a for node in nodes for a in node.after}
        return at, [task for place, task in enumerate(at) if place not in used]

    def _level(self, program: Program) -> str:
        """The outermost level an exchange crosses, "" for none."""
        hops = [move.group.hops[-1].name for move in self._flowing(program) if move.group.size > 1]
        return hops[0] if hops else ""

    def _latency(self, program: Program) -> float:
        return sum(self._empty(move.work) for move in self._flowing(program))

    def _flowing(self, program: Program) -> tuple[Move, ...]:
        """Return the moves that share ports: of a message its send, not the gather on arrival."""
        return program.moves[:1] if program.kind == "send" else program.moves

    def _wire(self, program: Program) -> float:
        """Seconds for which the exchanges of a program fill a port: those of long messages, which wait for nothing."""
        device, total = self.lowered.mesh.slices[0].devices[0], 0.0
        for move in self._flowing(program):
            long = self.costs.price(msgspec.structs.replace(move.work, num_bytes=MANY_BYTES), device).seconds
            total += long * move.num_bytes / MANY_BYTES
        return total

    def _empty(self, work: Collective) -> float:
        """Seconds of a collective that moves nothing."""
        device = self.lowered.mesh.slices[0].devices[0]
        return self.costs.price(msgspec.structs.replace(work, num_bytes=NO_BYTES), device).seconds
