"""A lowered plan as what each real rank has to do: per stream an ordered list of sleeps, messages and collectives.

Nothing is timed here and nothing is simulated: rank classes are unfolded into real ranks, passes into their layers'
pieces (so that exchanges inside a layer are executed too), and every message and collective gets its real ranks and
bytes. The order on a stream is the graph's.
"""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND, QUEUES
from meshwright.lower import Lowered
from meshwright.lower.program import Program
from meshwright.simulate.ports import PassPart, cut
from meshwright.simulate.price import Pricer
from meshwright.work import Group

#: Bytes of a message that says another has arrived.
RECEIPT = 4


class Op(msgspec.Struct, array_like=True):
    """One thing a rank does on a stream: ``sleep`` for ``seconds``, or move ``num_bytes`` over a channel (a collective
    of its ranks, or ``send``/``recv`` with ``peer`` and ``tag``). It starts after the ops in ``after`` (indices into
    the rank's list) and the one before it on its stream. ``task`` is the task of the graph it belongs to."""

    stream: int
    what: str
    seconds: float = 0.0
    num_bytes: int = 0
    channel: int = -1
    peer: int = -1
    tag: int = 0
    after: list[int] = []
    task: int = -1


class ScriptChannel(msgspec.Struct, frozen=True, array_like=True):
    """A process group of its own: ``ranks`` that exchange on one ``stream``, so that its order is theirs."""

    stream: str
    ranks: tuple[int, ...]


class Script(msgspec.Struct):
    """``ranks[r]`` is what rank r does; ``streams`` and ``channels`` are what its ops' numbers mean."""

    ranks: list[list[Op]]
    streams: list[str]
    channels: list[ScriptChannel]

    @property
    def num_ops(self) -> int:
        return sum(len(ops) for ops in self.ranks)

    @property
    def first_op(self) -> list[int]:
        """Where each rank's ops begin when all are laid one after another."""
        return np.concatenate([[0], np.cumsum([len(ops) for ops in self.ranks])]).astype(int).tolist()


class Author:
    """Numbers streams and channels while a script is written."""

    def __init__(self, num_ranks: int):
        self.ranks: list[list[Op]] = [[] for _ in range(num_ranks)]
        self._streams: dict[str, int] = {}
        self._channels: dict[ScriptChannel, int] = {}

    def stream(self, name: str) -> int:
        return self._streams.setdefault(name, len(self._streams))

    def channel(self, stream: str, ranks: tuple[int, ...]) -> int:
        return self._channels.setdefault(ScriptChannel(stream, ranks), len(self._channels))

    def put(self, rank: int, stream: str, what: str, **fields) -> int:
        """Append an op to a rank's stream; its index."""
        self.ranks[rank].append(Op(self.stream(stream), what, **fields))
        return len(self.ranks[rank]) - 1

    def script(self) -> Script:
        return Script(self.ranks, list(self._streams), list(self._channels))


def script_of(lowered: Lowered, costs: Costs) -> Script:
    """Return the script of every real rank of a lowered plan: its tasks in order, with their durations and messages.

    Raises:
        MeshwrightError: U003 for a cluster of several islands, whose ranks are not alike.
    """
    if len(lowered.mesh.cluster.islands) != 1:
        raise MeshwrightError.one(
            "U003", "only clusters of one island are emulated", help="name a cluster of equal devices"
        )
    author = Author(lowered.mesh.num_ranks)
    writer = _Writer(lowered, costs, author)
    for rank in range(lowered.mesh.num_ranks):
        writer.rank(rank)
    return author.script()


class _Writer:
    """Writes one rank after the other."""

    def __init__(self, lowered: Lowered, costs: Costs, author: Author):
        self.lowered, self.costs, self.author = lowered, costs, author
        self.pricer = Pricer(costs)
        self.graph, self.mesh, self.layout = lowered.graph, lowered.mesh, lowered.mesh.layout
        self.device = lowered.mesh.slices[0].devices[0]
        g = self.graph
        stream_class = g.streams.rank
        self.classes = [
            tuple(stream_class[g.member[g.member_ptr[i] : g.member_ptr[i + 1]]].tolist()) for i in range(g.num_tasks)
        ]
        self.queues = [QUEUES[g.streams.queue[g.member[g.member_ptr[i]]]] for i in range(g.num_tasks)]
        stage, microbatch = g.attribute("stage").tolist(), g.attribute("microbatch").tolist()
        self.home = {
            (stage[i], microbatch[i]): self.classes[i][0] for i in np.flatnonzero(g.kind == KIND["F"]).tolist()
        }
        self.target = {}
        for i in np.flatnonzero(g.kind == KIND["send"]).tolist():
            step = 1 if self.queues[i] == "pp_forward" else -1
            self.target[i] = self.home[stage[i] + step, microbatch[i]]
        self._passes: dict[int, list[PassPart]] = {}

    def rank(self, rank: int) -> None:
        own = rank // self.layout.stride("pp") % self.layout.pp
        done: dict[int, list[int]] = {}
        before: list[int] = []  # a pass ends with the last exchange inside it, and the next one waits for that
        for i in range(self.graph.num_tasks):
            program = self.lowered.programs[self.graph.cost_key[i]]
            if own in self.classes[i]:
                waits = self._after(i, done)
                if self.queues[i] == "compute":
                    done[i] = before = self._task(rank, i, program, sorted({*waits, *before}))
                else:
                    done[i] = self._task(rank, i, program, waits)
            elif self.target.get(i) == own:
                done[i] = self._receive(rank, i, own)

    def _after(self, i: int, done: dict[int, list[int]]) -> list[int]:
        """The ops here that task i waits for; what other ranks wait for, a collective makes everybody wait for."""
        deps = self.graph.dep[self.graph.dep_ptr[i] : self.graph.dep_ptr[i + 1]].tolist()
        return [op for d in deps for op in done.get(d, ())]

    def _task(self, rank: int, i: int, program: Program, after: list[int]) -> list[int]:
        put, queue = self.author.put, self.queues[i]
        match program.kind:
            case "pass":
                return self._pass(rank, i, program, after)
            case "update":
                return [put(rank, queue, "sleep", seconds=self.pricer(program).seconds, after=after, task=i)]
            case "send":
                return self._send(rank, i, after)
            case _:
                return self._exchange(rank, i, program, after)

    def _pass(self, rank: int, i: int, program: Program, after: list[int]) -> list[int]:
        nodes = self._passes.get(self.graph.cost_key[i])
        if nodes is None:
            nodes = self._passes[self.graph.cost_key[i]] = cut(self.costs, program)
        at: list[int] = []
        for node in nodes:
            waits = [at[a] for a in node.after] if node.after else after
            if node.work is None:
                at.append(
                    self.author.put(rank, "compute", "sleep", seconds=node.seconds, after=waits, task=i),
                )
            else:
                spans = self.mesh.spans(node.work.group)
                at.append(self._collective(rank, node.queue, node.work.op, node.work.num_bytes, spans, waits, i))
        used = {a for node in nodes for a in node.after}
        return [op for number, op in enumerate(at) if number not in used]

    def _collective(self, rank: int, queue: str, op: str, num_bytes: float, spans, after: list[int], task: int) -> int:
        ranks = members(spans, rank)
        what = "shift" if op == "send" else op
        channel = self.author.channel(queue, ranks)
        return self.author.put(rank, queue, what, num_bytes=round(num_bytes), channel=channel, after=after, task=task)

    def _send(self, rank: int, i: int, after: list[int]) -> list[int]:
        queue, own = self.queues[i], self.classes[i][0]
        peer = rank + (self.target[i] - own) * self.layout.stride("pp")
        channel = self.author.channel(queue, self._pipeline(rank))
        common = {"channel": channel, "peer": peer, "tag": i, "task": i}
        sent = self.author.put(rank, queue, "send", num_bytes=self._message_bytes(), after=after, **common)
        if not self.lowered.stages.plan.overlap.pp:
            # a blocking send ends when the receiver has the message
            sent = self.author.put(rank, queue, "recv", num_bytes=RECEIPT, **common)
        return [sent]

    def _receive(self, rank: int, i: int, own: int) -> list[int]:
        """The other end of a send, on a stream of its own per sender; the pieces of tensor-parallel ranks are gathered
        where the layers do not keep the sequence sharded."""
        source = rank + (self.classes[i][0] - own) * self.layout.stride("pp")
        queue = self.queues[i]
        stream = f"{queue} from {source - rank:+d}"
        common = {"channel": self.author.channel(queue, self._pipeline(rank)), "peer": source, "tag": i, "task": i}
        got = self.author.put(rank, stream, "recv", num_bytes=self._message_bytes(), **common)
        if not self.lowered.stages.plan.overlap.pp:
            self.author.put(rank, stream, "send", num_bytes=RECEIPT, **common)
        c = self.lowered.stages.context()
        if c.tp > 1 and not c.sp:
            spans = self.mesh.spans(c.tp_group)
            got = self._collective(rank, stream, "all_gather", self._message_bytes() * c.tp, spans, [got], i)
        return [got]

    def _message_bytes(self) -> int:
        c = self.lowered.stages.context()
        return round(c.tokens * c.model.hidden * c.element / c.tp)

    def _pipeline(self, rank: int) -> tuple[int, ...]:
        return members(((self.layout.stride("pp"), self.layout.pp),), rank)

    def _exchange(self, rank: int, i: int, program: Program, after: list[int]) -> list[int]:
        queue, classes = self.queues[i], self.classes[i]
        if not program.moves:
            return [self.author.put(rank, queue, "sleep", after=after, task=i)]
        last: list[int] = after
        used: set[str] = set()
        for op, num_bytes, group, *_ in program.moves:
            if len(classes) > 1:
                ranks = self._across(rank, classes, group)
            else:
                role = self._role(op, group, used)
                used.add(role)
                ranks = members(self.mesh.spans(self._roles()[role]), rank)
            channel = self.author.channel(queue, ranks)
            last = [self.author.put(rank, queue, op, num_bytes=round(num_bytes), channel=channel, after=last, task=i)]
        return last

    def _across(self, rank: int, classes: tuple[int, ...], group: Group) -> tuple[int, ...]:
        """Ranks of an exchange between pipeline ranks: all of the job's, or the pair that shares a weight."""
        if group.size == self.mesh.num_ranks:
            return tuple(range(self.mesh.num_ranks))
        stride = self.layout.stride("pp")
        first = rank - rank // stride % self.layout.pp * stride
        return tuple(sorted(first + c * stride for c in classes))

    def _roles(self) -> dict[str, Group]:
        """Groups that exchange parameters and gradients, and that of the gradients' norm."""
        shard, replica = self.mesh.hybrid_groups(self.layout.shard_group, "cp", "dp")
        everyone = self.mesh.group("tp", "cp", "dp", "pp")
        return {"shard": shard, "experts": self.mesh.expert_group("edp"), "replica": replica, "everyone": everyone}

    def _role(self, op: str, group: Group, used: set[str]) -> str:
        """Return the one of the groups that a step of an exchange is over: equal groups are one value, so their order
        decides."""
        sharded = self.layout.zero >= 1
        wanted = ("replica", "everyone") if sharded and op == "all_reduce" else ("shard", "experts", "everyone")
        return next(r for r in wanted if r not in used and self._roles()[r].size == group.size)


def members(spans: tuple[tuple[int, int], ...], rank: int) -> tuple[int, ...]:
    """The ranks that share a group with `rank`, of groups that lie along (stride, size) spans."""
    base = rank - sum(rank // stride % size * stride for stride, size in spans)
    steps = product(*(range(0, stride * size, stride) for stride, size in spans))
    return tuple(sorted(base + sum(step) for step in steps))
