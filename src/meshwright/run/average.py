"""Averages of parameters and moments between replicas that take steps of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from meshwright.run.coded import CodedSum
from meshwright.run.mesh import ProcessMesh, members
from meshwright.run.optimizer import Optimizer
from meshwright.run.pieces import TensorPiece
from meshwright.run.sync import HeldElements
from meshwright.sync.fragments import MOMENTS, PARAMETERS, Fragment

#: The state that a change is measured from, in checkpoints.
BEGUN = "round_start"


class Average:
    """One fragment of what this rank holds: 1-D views of parameters or moments, averaged as one run of values."""

    def __init__(
        self,
        fragment: Fragment,
        held: Sequence[HeldElements],
        views: Sequence[torch.Tensor],
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        self.group, self.held, self.views = mesh[fragment.replica.name], list(held), list(views)
        #: Which part of the values this rank has, among those of its shard and tensor-parallel ranks.
        self.part = f"{mesh[fragment.shard.name].index}.{mesh['tp'].index}"
        #: As many values as the longest shard has, so that every rank sends as much.
        self.length = max(ceil(fragment.num_elements / fragment.shard.size), sum(len(v) for v in views))
        self.sum = CodedSum(fragment, self.group, self.length, self.views[0], seed)
        #: Values at the last average, where what changed since then is encoded.
        self.begun = None if self.sum.code.exact else self._flat()

    def _flat(self) -> torch.Tensor:
        flat = torch.cat([view.detach() for view in self.views])
        return torch.cat((flat, flat.new_zeros(self.length - len(flat))))

    def begin(self) -> None:
        """Take the values as they are for those of the last average."""
        if self.begun is not None:
            self.begun.copy_(self._flat())

    def run(self) -> None:
        """Put the mean over the replicas in place of the values."""
        flat = self._flat()
        if self.begun is None:
            mean = self._mean(flat)
        else:
            mean = self.begun + self._mean(flat - self.begun)
            self.begun.copy_(mean)
        with torch.no_grad():
            for view, part in zip(self.views, mean[: sum(map(len, self.views))].split([len(v) for v in self.views])):
                view.copy_(part)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of all replicas' values, as they come out of the code."""
        self.sum.begin(values, key="average")
        total = self.sum.end()
        self.sum.settle(True)
        return total / self.group.size

    def pieces(self) -> Iterable[TensorPiece]:
        """The values of the last average, and what the code keeps, live."""
        states = [] if self.begun is None else [(BEGUN, self.begun)]
        for key, values in (*states, *self.sum.kept()):
            at = 0
            for h in self.held:
                size = h.stop - h.start
                yield TensorPiece(key, h.parameter, h.start, h.stop, values[at : at + size], h.owner)
                at += size
        yield from self.sum.factor_pieces(any(h.owner for h in self.held), self.part)


class Rounds:
    """Keeps replicas together that take steps of their own: averages at the end of every round. A plan whose replicas
    step together has rounds of one step and nothing to average."""

    def __init__(
        self,
        fragments: Iterable[Fragment],
        parts: Mapping[Any, Any],
        optimizer: Optimizer,
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        """`parts`: the parameters of each ((stage, segment), kind). `seed`: that of codes that draw."""
        fragments = tuple(fragments)
        self.mesh, self.every = mesh, max((fragment.every for fragment in fragments), default=1)
        #: Which of the sets of ranks that step together this rank is in, by their first ranks, and how many there are.
        firsts = sorted({ranks[0] for ranks in members(mesh.plan)["worker"]})
        self.replica, self.replicas = firsts.index(mesh["worker"].ranks[0]), len(firsts)
        self.averages = _averages(fragments, parts, optimizer, mesh, seed)
        self._sound = True

    def joined(self, step: int) -> bool:
        """Whether all replicas hold the same parameters after so many steps."""
        return step % self.every == 0

    def step(self, count: int, finite: bool) -> bool:
        """End the step that makes so many. At the end of a round the replicas average, unless a step of one of them was
        not finite since the last average: that is learnt, and said, at the end alone."""
        if not self.averages:
            return finite
        self._sound &= finite
        if not self.joined(count):
            return True
        sound = torch.tensor(float(self._sound), device=self.mesh.device)
        dist.all_reduce(sound, op=dist.ReduceOp.MIN, group=self.mesh["world"].handle)
        self._sound = True
        if sound:
            for average in self.averages:
                average.run()
        return bool(sound)

    def begin(self, step: int) -> None:
        """Go on as after so many steps: parameters were loaded."""
        for average in self.averages:
            average.sum.step = step // self.every
            if self.joined(step):
                average.begin()

    def named(self, pieces: list[TensorPiece]) -> list[TensorPiece]:
        """The pieces of this rank and those of its rounds; of replicas that step apart each has states of its own."""
        if not self.averages:
            return pieces
        found = [*pieces, *(piece for average in self.averages for piece in average.pieces())]
        return [piece._replace(key=f"{piece.key}@{self.replica}") for piece in found] if self.replica else found


def _averages(
    fragments: Iterable[Fragment], parts: Mapping[Any, Any], optimizer: Optimizer, mesh: ProcessMesh, seed: int
) -> list[Average]:
    """The averages of what the optimizer holds."""
    kinds = {parameter.info.name: key for key, some in parts.items() for parameter in some}
    held: dict[Any, list[int]] = {}
    for number, h in enumerate(optimizer.held):
        held.setdefault(kinds[h.parameter.name], []).append(number)
    out = []
    for fragment in fragments:
        numbers = held.get((fragment.units, fragment.kind), [])
        mine = [optimizer.held[i] for i in numbers]
        if fragment.what == PARAMETERS and mine:
            out.append(Average(fragment, mine, [h.master for h in mine], mesh, seed))
        elif fragment.what == MOMENTS and mine:
            out.append(Average(fragment, mine, [m for i in numbers for m in optimizer.moments(i)], mesh, seed))
    return out
