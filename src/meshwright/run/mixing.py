"""Parameters of replicas that meet by a graph: each sends its own to some others, point to point, and puts the weighted
mean of what it hears and its own in place of its own (Lian et al. 1705.09056).

Applied at once, replicas step and then mix. Applied a step later, messages travel beside that step and what it changed
is added to their mean, as in D-PSGD. In a code, what changed since the last message travels: a replica keeps what its
neighbours know of it, and the mean of what it knows of them (Koloskova et al. 1902.00340), which moves it by a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.codecs import on_tensors
from meshwright.run.coded import drawn_seed
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.outer import ARRIVED
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import Fragment
from meshwright.sync.groups import Turn, graph

#: What neighbours know of a replica, and the mean of what it knows of them and itself: states, in checkpoints.
KNOWN, HEARD = "mix_known", "mix_heard"


class Meeting(NamedTuple):
    """The messages of a rank in one turn of a graph: whom of its ``group`` it hears, and who hears it, by index."""

    group: AxisGroup
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, turn: Turn, group: AxisGroup) -> Meeting:
        """Return the messages of a group's rank in a turn of as many."""
        mine = group.index
        targets = tuple(i for i, heard in enumerate(turn) if any(one.source == mine for one in heard))
        return cls(group, tuple(one.source for one in turn[mine]), targets)

    def begin(self, wire: torch.Tensor, arrives: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start sending `wire` to all who hear, and hearing each source into its own buffer."""
        # rank by rank in one order on both sides, as backends that know no tags need it
        messages = [(dist.irecv, into, source) for into, source in zip(arrives, self.sources, strict=True)]
        messages += [(dist.isend, wire, target) for target in self.targets]
        ranks, handle = self.group.ranks, self.group.handle
        ops = [dist.P2POp(way, tensor, ranks[peer], handle) for way, tensor, peer in messages]
        return dist.batch_isend_irecv(ops) if ops else []


class MixedMean:
    """One fragment of what this rank holds: 1-D views of parameters or moments, mixed with those of the replicas that
    it meets. Like :class:`~meshwright.run.average.Average`, which means those of all."""

    def __init__(
        self,
        fragment: Fragment,
        held: Sequence[HeldElements],
        views: Sequence[torch.Tensor],
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        self.fragment, self.held, self.views, self.part = fragment, list(held), list(views), fragment.part
        self.group, self.seed = mesh[fragment.replica.name], seed
        self.graph = graph(fragment.mix.graph, self.group.size)
        self.code, self.tensors = codec(fragment.codec), on_tensors(fragment.codec)
        self.length = max(ceil(fragment.num_elements / fragment.shard.size), sum(len(v) for v in views))
        #: Exchanges that have begun.
        self.step = 0
        self.state: dict[str, torch.Tensor] = {}
        if fragment.lag:
            self.state[ARRIVED] = self.views[0].new_zeros(self.length)
        if not self.code.exact:
            self.state |= {KNOWN: self._flat(), HEARD: self._flat()}
        self._sent: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._arrives: list[tuple[float, torch.Tensor]] = []
        self._works: list[dist.Work] = []
        self._token = -1
        self._exchange, self._targets = 0, 0

    def _flat(self) -> torch.Tensor:
        flat = torch.cat([view.detach() for view in self.views])
        return torch.cat((flat, flat.new_zeros(self.length - len(flat))))

    def begin(self) -> None:
        """Take the values as they are for those that all know: every replica has the same."""
        for key in (KNOWN, HEARD):
            if key in self.state:
                self.state[key].copy_(self._flat())

    def at(self, exchanges: int) -> None:
        """Go on as after so many exchanges."""
        self.step = exchanges

    def turn(self) -> None:
        """Apply what was sent before, and send anew."""
        self.apply()
        self.send()

    def send(self) -> None:
        """Start sending to those who hear this replica, and hearing others."""
        self._sent, self._exchange = self._flat(), self.step
        turn, lag = self.graph.at(self.step), self.fragment.lag
        self._wire = self._sent if self.code.exact else self._encoded(self._sent - self.state[KNOWN])
        meeting = Meeting.of(turn, self.group)
        self._arrives = [(one.weight, torch.empty_like(self._wire)) for one in turn[self.group.index]]
        self._token = -1 if lag else self._begun(len(meeting.targets))
        self._works = meeting.begin(self._wire, [into for _, into in self._arrives])
        self._targets = len(meeting.targets)
        self.step += 1

    def _begun(self, messages: int) -> int:
        label = {"stage": self.fragment.units[0], "layer": self.fragment.units[1], "key": "average"}
        queue = "outer" if self.fragment.lag else "dp"
        return recorder().start("neighbours", queue, num_bytes=self._wire.nbytes * messages, **label)

    def arrive(self) -> None:
        """Wait for what is on its way, and keep what it changes until it is applied."""
        if self._sent is not None:
            sent = self._sent
            self.state[ARRIVED].copy_(self._mixed() - sent)

    def _mixed(self) -> torch.Tensor:
        """Wait for the messages: what they make of the values that were sent."""
        token = self._begun(self._targets) if self.fragment.lag else self._token
        for work in self._works:
            work.wait()
        recorder().stop(token)
        sent, own = self._sent, 1.0 - sum(weight for weight, _ in self._arrives)
        if self.code.exact:
            mixed = sum((weight * values for weight, values in self._arrives), own * sent)
            mixed = self._corrected(mixed)
        else:
            mine = self._decoded(self._wire)
            heard = sum((weight * self._decoded(wire) for weight, wire in self._arrives), own * mine)
            self.state[KNOWN].add_(mine)
            self.state[HEARD].add_(heard)
            mixed = sent + self.fragment.mix.share * (self.state[HEARD] - self.state[KNOWN])
        self._sent, self._wire, self._arrives, self._works = None, None, [], []
        return mixed

    def _corrected(self, mixed: torch.Tensor) -> torch.Tensor:
        """The mean, with every matrix as far spread as those that it is the mean of are, in theirs."""
        if not self.fragment.mix.respread:
            return mixed
        others, own = [(1.0 - sum(w for w, _ in self._arrives), self._sent), *self._arrives], mixed.clone()
        at = 0
        for h in self.held:
            here = slice(at, at + h.stop - h.start)
            at = here.stop
            if h.decays and here.stop - here.start > 1:
                wanted = sum(weight * values[here].var(correction=0) for weight, values in others)
                got, mean = mixed[here].var(correction=0), mixed[here].mean()
                if got > 0:
                    own[here] = mean + (mixed[here] - mean) * (wanted / got).sqrt()
        return own

    def apply(self) -> None:
        """Put what the messages make of the values in their place; of values that went on meanwhile, move them as
        far."""
        late, sizes = ARRIVED in self.state, [len(view) for view in self.views]
        if late:
            self.arrive()
        found = self.state[ARRIVED] if late else self._mixed()
        with torch.no_grad():
            for view, part in zip(self.views, found[: sum(sizes)].split(sizes)):
                view.add_(part) if late else view.copy_(part)

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        return self.tensors.encode(values, self._drawn())

    def _decoded(self, wire: torch.Tensor) -> torch.Tensor:
        return self.tensors.decode(wire, self.length, self._sent.dtype, self._drawn())

    def _drawn(self) -> int:
        """The seed of what a code draws for an exchange."""
        if not self.code.drawn:
            return 0
        place = f"{self.fragment.units}{self.fragment.kind}"
        return drawn_seed(self.code, self.seed, self._exchange, place, self.group.index)

    def pieces(self) -> Iterable[TensorPiece]:
        """The states of this rank, live: what neighbours know, and what is on its way."""
        if self.fragment.lag:
            self.arrive()
        for key, values in self.state.items():
            at = 0
            for h in self.held:
                size = h.stop - h.start
                yield TensorPiece(key, h.parameter, h.start, h.stop, values[at : at + size], h.owner)
                at += size
