"""Training steps of a recommendation model on real ranks, with its tables where a placement has them.

Every rank looks up for the whole batch in the tables that it has, an all-to-all brings each rank the vectors of its own
samples and takes their gradients back, and gradients of replicated parameters are summed (Mudigere et al., 2022, arXiv
2104.05158). Rows that were looked up are updated by row-wise AdaGrad, dense layers by AdaGrad. Tables cut by columns
keep the mean square of their own columns, which are other numbers than those of whole rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from meshwright.assign.tables import REPLICATED, ROWS, TablePlacement
from meshwright.spec.recommender import DOT, Recommender

#: What is added to a root mean square before it divides.
EPSILON = 1e-8


class Samples(NamedTuple):
    """Samples of one rank: ``dense`` [n, features], ``rows`` int64 [n, pooling] of every table, ``clicked`` [n]."""

    dense: Tensor
    rows: tuple[Tensor, ...]
    clicked: Tensor


class DenseLayers(nn.Module):
    """The layers outside of tables: bottom MLP, interaction, top MLP."""

    def __init__(self, model: Recommender):
        super().__init__()
        self.model, count = model, len(model.tables) + 1
        self.bottom = nn.ModuleList(nn.Linear(i, o) for i, o in model.bottom_products())
        self.top = nn.ModuleList(nn.Linear(i, o) for i, o in model.top_products(count))
        crossed = model.cross_products(count)
        self.cross = nn.ModuleList(nn.Linear(i, o, bias=n % 2 == 1) for n, (i, o) in enumerate(crossed))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n] of `dense` [n, features] and `pooled` vectors [n, tables, dim]."""
        for layer in self.bottom:
            dense = torch.relu(layer(dense))
        vectors = torch.cat([dense[:, None], pooled], dim=1)
        if self.model.interaction == DOT:
            i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
            met = torch.cat([dense, torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]], dim=1)
        else:
            first = met = vectors.flatten(1)
            for down, up in zip(self.cross[::2], self.cross[1::2]):
                met = first * up(down(met)) + met
        for number, layer in enumerate(self.top):
            met = layer(met)
            met = torch.relu(met) if number + 1 < len(self.top) else met
        return met[:, 0]


class TablePart(NamedTuple):
    """A part of a table on this rank: which, the columns and rows it has, its ``weight`` and ``state`` [rows]."""

    table: int
    columns: slice
    rows: slice
    weight: Tensor
    state: Tensor


class TrainedTables:
    """The tables of a model as rank `rank` of a placement has them, and the layers that all ranks have; ``weights`` are
    all tables whole, of which each rank keeps its parts. Placements with towers are not carried out."""

    def __init__(
        self,
        model: Recommender,
        placement: TablePlacement,
        weights: list[Tensor],
        dense: DenseLayers,
        rank: int,
        lr: float,
    ):
        if placement.tower != placement.num_ranks:
            raise ValueError("towers are priced and not run: place tables without them")
        self.model, self.placement, self.dense, self.rank, self.lr = model, placement, dense, rank, lr
        self.squares = [torch.zeros_like(p) for p in dense.parameters()]
        self.parts = [self._parts(r, weights) for r in range(placement.num_ranks)]
        self.mine = [part._replace(weight=part.weight.clone()) for part in self.parts[rank]]
        whole = [t for t, item in enumerate(placement.items) if item.way == REPLICATED]
        self.alike = {t: (weights[t].clone(), weights[t].new_zeros(len(weights[t]))) for t in whole}

    def _parts(self, rank: int, weights: list[Tensor]) -> list[TablePart]:
        """The parts of tables that one rank has, by table and column."""
        out = []
        for table, item in enumerate(self.placement.items):
            weight, holders = weights[table], self.placement.ranks(table)
            for slice_, holder in enumerate(holders):
                if holder != rank or item.way == REPLICATED:
                    continue
                wide = weight.shape[1] // item.parts
                columns = slice(slice_ * wide, (slice_ + 1) * wide) if item.way != ROWS else slice(0, weight.shape[1])
                long = -(-len(weight) // len(holders)) if item.way == ROWS else len(weight)
                rows = slice(slice_ * long, (slice_ + 1) * long) if item.way == ROWS else slice(0, long)
                part = weight[rows, columns]
                out.append(TablePart(table, columns, rows, part, part.new_zeros(len(part))))
        return out

    def step(self, samples: Samples) -> float:
        """Train on this rank's samples, of as many on every rank; return the loss, the mean over all samples."""
        ranks, own = self.placement.num_ranks, len(samples.clicked)
        asked = self._indices(samples)
        looked = [self._looked_up(part, rows) for part, rows in zip(self.mine, asked)]
        pooled = samples.dense.new_zeros(own, len(self.model.tables), self.model.dim)
        for table, (weight, _) in self.alike.items():
            pooled[:, table] = weight[samples.rows[table]].sum(dim=1)
        sent = torch.cat([one.reshape(ranks, own, -1) for one in looked], dim=2) if looked else None
        for source, found in enumerate(self._swapped(sent, own, samples.dense)):
            at = 0
            for part in self.parts[source]:
                wide = part.columns.stop - part.columns.start
                pooled[:, part.table, part.columns] += found[:, at : at + wide]  # partial sums of rows add up
                at += wide
        pooled.requires_grad_()
        logits = self.dense(samples.dense, pooled)
        loss = binary_cross_entropy_with_logits(logits, samples.clicked, reduction="sum") / (own * ranks)
        self.dense.zero_grad()
        loss.backward()
        self._update_tables(samples, asked, pooled.grad)
        self._update_dense()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def _indices(self, samples: Samples) -> list[Tensor]:
        """The rows of all ranks' samples [batch, pooling] in every table of which this rank has a part."""
        ranks, own = self.placement.num_ranks, len(samples.clicked)
        out = [
            torch.cat([samples.rows[p.table].reshape(-1) for p in parts] or [samples.rows[0].new_zeros(0)])
            for parts in self.parts
        ]
        each = sum(samples.rows[part.table].numel() for part in self.mine)
        found = samples.rows[0].new_empty(each * ranks)
        dist.all_to_all_single(found, torch.cat(out), [each] * ranks, [len(one) for one in out])
        widths = [samples.rows[part.table].shape[1] for part in self.mine]
        by_part = found.reshape(ranks, -1).split([own * width for width in widths], dim=1)
        return [one.reshape(ranks * own, width) for one, width in zip(by_part, widths)]

    def _looked_up(self, part: TablePart, rows: Tensor) -> Tensor:
        """The sums of a part's rows [batch, columns]; rows that others have count for nothing."""
        here = (rows >= part.rows.start) & (rows < part.rows.start + len(part.weight))
        found = part.weight[torch.where(here, rows - part.rows.start, 0)]
        return (found * here[..., None]).sum(dim=1)

    def _swapped(self, sent: Tensor | None, own: int, like: Tensor) -> list[Tensor]:
        """This rank's samples [own, columns] from every rank, of [ranks, own, columns] that each looked up."""
        wide = [sum(p.columns.stop - p.columns.start for p in parts) for parts in self.parts]
        sizes = [own * one for one in wide]
        found = like.new_empty(sum(sizes))
        mine = like.new_empty(0) if sent is None else sent.reshape(-1)
        dist.all_to_all_single(found, mine, sizes, [sizes[self.rank]] * len(wide))
        return [one.reshape(own, columns) for one, columns in zip(found.split(sizes), wide)]

    def _update_tables(self, samples: Samples, asked: list[Tensor], gradient: Tensor) -> None:
        """Take the gradients of pooled vectors [own, tables, dim] to the ranks of the tables, and update rows there."""
        ranks, own = self.placement.num_ranks, len(samples.clicked)
        out = [
            torch.cat([gradient[:, p.table, p.columns].reshape(-1) for p in parts] or [gradient.new_empty(0)])
            for parts in self.parts
        ]
        found = gradient.new_empty(len(out[self.rank]) * ranks)
        dist.all_to_all_single(found, torch.cat(out), [len(out[self.rank])] * ranks, [len(one) for one in out])
        sizes = [own * (part.columns.stop - part.columns.start) for part in self.mine]
        for part, rows, one in zip(self.mine, asked, found.reshape(ranks, -1).split(sizes, dim=1)):
            here = (rows >= part.rows.start) & (rows < part.rows.start + len(part.weight))
            summed = _summed(rows - part.rows.start, here, one.reshape(ranks * own, -1), len(part.weight))
            self._update_rows(part.weight, part.state, summed)
        for table, (weight, state) in self.alike.items():
            rows = samples.rows[table]
            summed = _summed(rows, torch.ones_like(rows, dtype=torch.bool), gradient[:, table], len(weight))
            dist.all_reduce(summed)
            self._update_rows(weight, state, summed)

    def _update_rows(self, weight: Tensor, state: Tensor, gradient: Tensor) -> None:
        """Row-wise AdaGrad: the state of a row is the sum of its gradients' mean squares."""
        state += gradient.square().mean(dim=1)
        weight -= self.lr * gradient / (state.sqrt() + EPSILON)[:, None]

    @torch.no_grad()
    def _update_dense(self) -> None:
        for parameter, square in zip(self.dense.parameters(), self.squares):
            dist.all_reduce(parameter.grad)
            square += parameter.grad.square()
            parameter -= self.lr * parameter.grad / (square.sqrt() + EPSILON)

    def gathered(self) -> list[Tensor]:
        """Every table whole, on every rank."""
        out = [torch.zeros(t.rows, t.dim, dtype=next(self.dense.parameters()).dtype) for t in self.model.tables]
        for part in self.mine:
            out[part.table][part.rows, part.columns] = part.weight
        for table in out:
            dist.all_reduce(table)
        for table, (weight, _) in self.alike.items():
            out[table] = weight.clone()
        return out


def _summed(rows: Tensor, here: Tensor, gradient: Tensor, count: int) -> Tensor:
    """The gradient of every row of a part [count, columns]: the sum of those of the samples [batch] that looked it
    up, `here` [batch, pooling] where this part has it."""
    each = gradient[:, None].expand(*rows.shape, gradient.shape[1])[here]
    return gradient.new_zeros(count, gradient.shape[1]).index_add_(0, rows[here], each)
