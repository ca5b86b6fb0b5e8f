"""Replicas that step and meet by clocks of their own (``sync/clocks.py``): DADAO's six values, in real processes.

A process goes through the ticks of its own replica in their order. For a meeting it sends to one other and hears it,
and waits for that one alone; momenta mix for as much time as has passed since the tick before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import torch
import torch.distributed as dist

from meshwright.run.mesh import ProcessMesh
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.sync.clocks import ClockConstants, Clocks
from meshwright.sync.fragments import Fragment

#: The momentum of the parameters, the dual of the gradient and that of agreement, with the momentum of each: states, in
#: checkpoints, in the order of the constants' mixing.
MOMENTA = ("dadao_x", "dadao_y", "dadao_y_momentum", "dadao_z", "dadao_z_momentum")


class TickingValues:
    """One fragment of what this rank holds: 1-D views of parameters, with five values beside each."""

    def __init__(
        self,
        fragment: Fragment,
        held: Sequence[HeldElements],
        views: Sequence[torch.Tensor],
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        self.fragment, self.held, self.views, self.part = fragment, list(held), list(views), fragment.part
        self.group = mesh[fragment.replica.name]
        self.length = max(ceil(fragment.num_elements / fragment.shard.size), sum(len(v) for v in views))
        self.constants: ClockConstants | None = None
        self.state = {key: self.views[0].new_zeros(self.length) for key in MOMENTA}
        self._sent: torch.Tensor | None = None
        self._heard: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._token = -1

    def _flat(self) -> torch.Tensor:
        flat = torch.cat([view.detach() for view in self.views])
        return torch.cat((flat, flat.new_zeros(self.length - len(flat))))

    def _put(self, flat: torch.Tensor) -> None:
        sizes = [len(view) for view in self.views]
        with torch.no_grad():
            for view, part in zip(self.views, flat[: sum(sizes)].split(sizes)):
                view.copy_(part)

    def begin(self) -> None:
        """Begin where nothing moves but by gradients: momenta are the values, the dual of the gradient makes up for the
        curvature that is taken from the loss, and replicas agree."""
        flat = self._flat()
        beside = (flat, -self.constants.flat * flat, -self.constants.flat * flat)
        for key, values in zip(MOMENTA, beside):
            self.state[key].copy_(values)
        for key in MOMENTA[3:]:
            self.state[key].zero_()

    def at(self, exchanges: int) -> None:
        """Go on as after so many exchanges: nothing depends on their number."""

    def pass_time(self, mixing: torch.Tensor) -> None:
        """Mix the momenta by a matrix [6, 6], that of the time that has passed."""
        mixed = mixing @ torch.stack((self._flat(), *self.state.values()))
        self._put(mixed[0])
        for key, values in zip(MOMENTA, mixed[1:]):
            self.state[key].copy_(values)

    def send(self, other: int) -> None:
        """Start sending to another replica, and hearing it."""
        self._sent = self.state["dadao_y"] + self.state["dadao_z"]
        self._heard = torch.empty_like(self._sent)
        label = {"stage": self.fragment.units[0], "layer": self.fragment.units[1], "key": "average"}
        self._token = recorder().start("neighbours", "dp", num_bytes=self._sent.nbytes, **label)
        rank, handle = self.group.ranks[other], self.group.handle
        both = (dist.irecv, self._heard), (dist.isend, self._sent)
        self._works = dist.batch_isend_irecv([dist.P2POp(way, values, rank, handle) for way, values in both])

    def agree(self) -> None:
        """Wait for the other replica, and go towards it."""
        for work in self._works:
            work.wait()
        recorder().stop(self._token)
        apart = self._sent - self._heard
        self.state["dadao_z"].sub_(apart, alpha=self.constants.agrees)
        self.state["dadao_z_momentum"].sub_(apart, alpha=self.constants.agrees_momentum)
        self._sent, self._heard, self._works = None, None, []

    def descend(self, rate: float, decay: float) -> None:
        """Take a gradient step of a learning rate."""
        own = self._flat()
        along = torch.zeros_like(own)
        for h, part in zip(self.held, along.split([len(v) for v in self.views] + [self.length - self._size])):
            part.copy_(h.gradient).add_(h.master.detach(), alpha=decay if h.decays else 0.0)
        along.sub_(own, alpha=self.constants.flat).sub_(self.state["dadao_y_momentum"])
        self._put(own.sub_(along, alpha=rate))
        self.state["dadao_x"].sub_(along, alpha=rate * self.constants.momentum)
        self.state["dadao_y_momentum"].add_(along, alpha=self.constants.answers)

    @property
    def _size(self) -> int:
        return sum(len(view) for view in self.views)

    def pieces(self) -> Iterable[TensorPiece]:
        """Yield the states of this rank, live."""
        for key, values in self.state.items():
            at = 0
            for h in self.held:
                size = h.stop - h.start
                yield TensorPiece(key, h.parameter, h.start, h.stop, values[at : at + size], h.owner)
                at += size


class Ticking:
    """The clock of one replica, and the values that it moves: a step is a unit of time. `rate` is the largest learning
    rate of the run."""

    def __init__(self, clocks: Clocks, values: list[TickingValues], replica: int, replicas: int, rate: float):
        self.clocks, self.values, self.replica, self.replicas = clocks, values, replica, replicas
        self.constants = clocks.constants(replicas, rate)
        self.mixing = torch.tensor(self.constants.mixing, dtype=torch.float64)
        #: The time of the last tick within the unit.
        self.now = 0.0
        for one in values:
            one.constants = self.constants
            one.begin()

    def until_gradient(self, step: int) -> None:
        """Meet whom this replica meets before its gradient step, up to that time."""
        self.now = 0.0
        for tick in self.clocks.of_replica(self.replica, self.replicas, step):
            self._pass_to(tick.at)
            if tick.other < 0:
                return
            self._meet(tick.other)

    def after_gradient(self, step: int, rate: float, decay: float) -> None:
        """Take the gradient step of a learning rate, and meet whom this replica meets after it."""
        for one in self.values:
            one.descend(rate, decay)
        ticks = self.clocks.of_replica(self.replica, self.replicas, step)
        own = next(number for number, tick in enumerate(ticks) if tick.other < 0)
        for tick in ticks[own + 1 :]:
            self._pass_to(tick.at)
            self._meet(tick.other)
        self._pass_to(1.0)

    def _pass_to(self, at: float) -> None:
        mixing = torch.linalg.matrix_exp(self.mixing * (at - self.now))
        for one in self.values:
            one.pass_time(mixing.to(one.views[0].device, one.views[0].dtype))
        self.now = at

    def _meet(self, other: int) -> None:
        for one in self.values:
            one.send(other)
        for one in self.values:
            one.agree()
