"""Microbatches under groups of ranks: the documents of a batch, shared by groups that are formed for it.

Every rank has the whole batch and forms the same groups (``assign/groups.py``), so that nothing is exchanged to agree
on them. In each round a rank has one row: of each of its groups, from the largest in, its share of the tokens of the
documents that the group shares. Products of weights see the row as a whole; attention works segment by segment, each
among the ranks of its group, as context parallelism does. Their communicators are made once, one for every group of
every size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from meshwright.assign.groups import GroupCosts, Grouped, GroupProblem, RankGroup, form_groups
from meshwright.plan import Plan
from meshwright.run.attention import is_balanced, local_positions
from meshwright.run.data import Batch
from meshwright.run.mesh import AxisGroup, ProcessMesh, group_name
from meshwright.run.parts import Pass, Segment
from meshwright.run.rotary import rotaries
from meshwright.simulate.groups import by_operations, capacity, meets_in_rounds
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class WholeDocument(NamedTuple):
    """A document of a batch: tokens [start, stop) of a row."""

    row: int
    start: int
    stop: int


class GroupRow(NamedTuple):
    """The row of a rank in a round: tokens, targets, positions in their documents and numbers in the global batch,
    int64 [1, s] each, the segments of its groups, and whether activations that the plan moves are its own too."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor
    segments: tuple[Segment, ...]
    moves: bool = True


class GroupRows:
    """Forms the groups of every batch for a rank, by `costs`; by operations alone where they are left out."""

    def __init__(self, plan: Plan, model: Model, train: Train, mesh: ProcessMesh, costs: GroupCosts | None = None):
        self.plan, self.train, self.mesh = plan, train, mesh
        self.method, self.algorithm = plan.sequence.groups, plan.sequence.algorithm
        self.costs = costs or by_operations(plan, model, train)
        self.balanced = is_balanced(self.algorithm, train.causal)
        self.rank = mesh["data"].index

    def of(self, batch: Batch) -> list[GroupRow]:
        """Return this rank's row of every round of a whole global batch with targets."""
        found, rounds = documents_of(batch), self.formed(batch, self.mesh["data"].size).rounds
        return [self._row(batch, found, [g for g in groups if self._inside(g)]) for groups in rounds]

    def formed(self, batch: Batch, ranks: int) -> Grouped:
        """Return the groups of `ranks` ranks for the documents of a batch."""
        problem = GroupProblem(
            lengths=np.array([d.stop - d.start for d in documents_of(batch)], np.int64),
            ranks=ranks,
            capacity=capacity(self.plan, self.train),
            costs=self.costs,
            together=meets_in_rounds(self.plan),
            stages=self.plan.layout.pp,
            long=self.plan.sequence.long,
        )
        return form_groups(self.method, problem)

    def _inside(self, group: RankGroup) -> bool:
        return group.first <= self.rank < group.first + group.size

    def _row(self, batch: Batch, found: list[WholeDocument], mine: list[RankGroup]) -> GroupRow:
        """Put together the row of a rank in these groups; without any, tokens from which nothing is learnt."""
        tp = self.plan.layout.tp if self.plan.layout.sp else 1
        parts, segments, first, tokens = [], [], 0, 0
        for group in sorted(mine, key=lambda g: -g.size) or [RankGroup(self.rank, 1, ())]:
            columns, numbers = self._shared(batch, [found[d] for d in group.documents])
            size = group.size
            tokens += -(-columns.shape[1] // size)
            unit = size * tp * (2 if self.balanced and size > 1 else 1)
            length = max(1, -(-columns.shape[1] // unit)) * unit
            padded = torch.zeros((4, length), dtype=torch.int64)
            padded[1] = -1
            padded[:, : columns.shape[1]] = columns
            documents = torch.full((1, length), len(group.documents), dtype=torch.int32)
            documents[0, : columns.shape[1]] = numbers
            at = local_positions(length, size, self.rank - group.first, self.algorithm, self.train.causal)
            parts.append(padded[:, at])
            segments.append(Segment(first, first + len(at), self._group(group), documents.to(self.mesh.device)))
            first += len(at)
        row = torch.cat(parts, 1).unsqueeze(1).to(self.mesh.device)
        moves = self.plan.sequence.long == 1 or tokens > capacity(self.plan, self.train)
        return GroupRow(*row, segments=tuple(segments), moves=moves)

    def _shared(self, batch: Batch, some: list[WholeDocument]) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay documents one behind the other: tokens, targets, positions and numbers in the batch, int64 [4, tokens],
        and which document each token is of."""
        columns, numbers = [torch.zeros((4, 0), dtype=torch.int64)], [torch.zeros(0, dtype=torch.int32)]
        width = batch.targets.shape[1]
        for number, (row, start, stop) in enumerate(some):
            here = slice(start, stop)
            place = torch.arange(start, stop) + row * width
            known = (batch.tokens[row, here], batch.targets[row, here], batch.positions[row, here], place)
            columns.append(torch.stack(known))
            numbers.append(torch.full((stop - start,), number, dtype=torch.int32))
        return torch.cat(columns, 1), torch.cat(numbers)

    def _group(self, group: RankGroup) -> AxisGroup:
        if group.size == 1:
            return self.mesh["self"]
        return self.mesh[group_name(group.size)]


def documents_of(batch: Batch) -> list[WholeDocument]:
    """Return the documents of packed rows of which something is learnt, in their order."""
    out = []
    for row, (numbers, targets) in enumerate(zip(batch.documents, batch.targets)):
        ends = (numbers[1:] != numbers[:-1]).nonzero().flatten() + 1
        bounds = [0, *ends.tolist(), len(numbers)]
        out += [WholeDocument(row, a, b) for a, b in pairwise(bounds) if bool((targets[a:b] >= 0).any())]
    return out


def round_passes(rows: list[GroupRow], model: Model, compute: torch.dtype, scale: float, step: int) -> list[Pass]:
    """Return the microbatches of a rank's rows, one a round."""
    return [
        Pass(
            tokens=row.tokens,
            targets=row.targets,
            positions=row.positions,
            documents=None,
            **rotaries(row.positions, model, compute),
            rows=row.numbers.T,
            scale=scale,
            step=step,
            segments=row.segments,
            moves=row.moves,
        )
        for row in rows
    ]
