"""H2O's attention: of every head of keys as many tokens stay as the decider counts (Zhang et al. 2306.14048).

A budget keeps K(n) of n computed tokens (:func:`~meshwright.serving.kv_budget.tokens_kept`), in the first K(n) slots of
a sequence's blocks. Half of them, rounded up, are the last tokens; the others those that had most attention so far,
summed over all queries and over the query heads that share the key. A slot holds another token in every head, so each
has its position and its sum beside it.

Tokens of a prompt that are computed in one iteration see one another whole, and what is too much leaves behind them;
those of an answer come one by one, also where they are computed again after a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.run.self_attention import HeadsCore
from meshwright.run.serve.packed import PackedRow
from meshwright.run.serve.paged import KvBlocks, alike, attended, kv_shape, zeros
from meshwright.serving.kv_budget import tokens_kept

#: Weights of attention that a prompt's queries have at a time: 8 MiB in 32 bits, near to what a processor caches.
MOST = 1 << 21


class HeavyBlocks(KvBlocks):
    """Blocks under a budget that keeps a `share` of the tokens: beside keys and values the ``positions`` and the
    ``sums`` of attention [blocks, block, kv_heads] of what lies in each slot."""

    def __init__(self, modules: Sequence[HeadsCore], blocks: int, block: int, *, share: float, dtype, device):
        super().__init__(modules, blocks, block, dtype=dtype, device=device)
        self.share, self.precise = share, precise(dtype)
        shapes = [(blocks, block, kv_shape(module)[0]) for module in modules]
        self.positions = [zeros(shape, torch.int32, device) for shape in shapes]
        self.sums = [zeros(shape, self.precise, device) for shape in shapes]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All that lies in blocks."""
        return (*super().parts, *self.positions, *self.sums)


class _Layer(NamedTuple):
    """A layer's part of all slots [slots, kv_heads, ...], how its scores are made of products, and its sliding
    window."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    sums: torch.Tensor
    scale: float
    cap: float
    window: int

    def scores(self, products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scores of products of queries and keys."""
        found = products.to(dtype) * self.scale
        return self.cap * torch.tanh(found / self.cap) if self.cap else found

    def put(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, sums: torch.Tensor) -> None:
        """Put tokens into slots [n, kv_heads]: keys and values [n, kv_heads, d], positions and sums [n, kv_heads]."""
        heads = self.sums.shape[1]
        where = (slots * heads + torch.arange(heads, device=slots.device)).flatten()
        for kept, new in ((self.keys, k), (self.values, v)):
            kept.view(-1, kept.shape[-1]).index_copy_(0, where, new.reshape(len(where), -1))
        for kept, new in ((self.positions, at), (self.sums, sums)):
            kept.view(-1).index_copy_(0, where, new.reshape(-1))


class _Singles(NamedTuple):
    """Sequences that compute a token each, at ``past`` [n], which are ``rows`` of the packed tokens: the ``slots`` [n,
    wide] of what they keep, as far as they are ``held`` [n, wide], which is at these places (``at``). A token
    gets the ``free`` slot [n], or where there is none (-1) that of whoever leaves, who is at no position from
    ``recent`` [n] on."""

    rows: torch.Tensor
    past: torch.Tensor
    slots: torch.Tensor
    held: torch.Tensor
    at: torch.Tensor
    free: torch.Tensor
    recent: torch.Tensor

    def attend(self, layer: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention of q [n, heads, d] to what is kept and to the token itself, k and v [n, kv_heads, d]."""
        count, shared, precise = len(q), k.shape[1], layer.sums.dtype
        mine = q.unflatten(1, (shared, -1))
        near, far = (_taken(kept, self.slots).transpose(1, 2) for kept in (layer.keys, layer.values))
        at = layer.positions[self.slots].transpose(1, 2)  # [n, kv_heads, wide]
        products = torch.cat((mine @ near.mT, (mine * k.unsqueeze(2)).sum(-1, keepdim=True)), -1)
        hidden = ~self.held.unsqueeze(1)
        unseen = hidden | (at <= (self.past - layer.window)[:, None, None]) if layer.window else hidden.expand_as(at)
        scores = layer.scores(products, precise)
        scores[..., :-1].masked_fill_(unseen.unsqueeze(2), float("-inf"))
        weights = scores.softmax(-1)
        some = weights.to(q.dtype)
        out = some[..., :-1] @ far + some[..., -1:] * v.unsqueeze(2)
        given = weights.sum(2)
        sums = layer.sums[self.slots].transpose(1, 2) + given[..., :-1]
        layer.sums.index_copy_(0, self.slots.view(-1)[self.at], sums.transpose(1, 2).flatten(0, 1)[self.at])
        stays = hidden | (at >= self.recent[:, None, None])
        least = sums.masked_fill(stays, float("inf")).argmin(-1)  # [n, kv_heads]
        target = torch.where(self.free.unsqueeze(1) < 0, self.slots.gather(1, least), self.free.unsqueeze(1))
        places = self.past.to(torch.int32).unsqueeze(1).expand(count, shared)
        layer.put(target, k, v, places, given[..., -1])
        return out.reshape(count, q.shape[1], -1)


class _Prompt(NamedTuple):
    """Tokens ``rows`` of a prompt, behind `past` others: the ``slots`` of what is kept of those, and the ``after`` ones
    of what is kept behind them, the last from position ``recent`` on in any case."""

    rows: slice
    past: int
    slots: torch.Tensor
    after: torch.Tensor
    recent: int

    def attend(self, layer: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention of q [n, heads, d] to what is kept and to those of k and v [n, kv_heads, d] up to each."""
        count, shared, device = len(q), k.shape[1], q.device
        mine = q.unflatten(1, (shared, -1)).permute(1, 2, 0, 3)  # [kv_heads, queries of a key, n, d]
        near = torch.cat((layer.keys[self.slots], k)).transpose(0, 1)
        far = torch.cat((layer.values[self.slots], v)).transpose(0, 1)
        places = torch.arange(self.past, self.past + count, device=device, dtype=torch.int32)
        at = torch.cat((layer.positions[self.slots], places.unsqueeze(1).expand(-1, shared))).T
        sums = F.pad(layer.sums[self.slots].T, (0, count))
        out = q.new_empty((shared, mine.shape[1], count, far.shape[-1]))
        step = max(1, MOST // (q.shape[1] * at.shape[1]))
        for begin in range(0, count, step):
            some, last = slice(begin, begin + step), len(self.slots) + min(count, begin + step)
            here, there = places[some, None], at[:, None, :last]
            unseen = there > here
            if layer.window:
                unseen |= there <= here - layer.window
            scores = layer.scores(mine[:, :, some] @ near[:, None, :last].mT, sums.dtype)
            weights = scores.masked_fill_(unseen.unsqueeze(1), float("-inf")).softmax(-1)
            out[:, :, some] = weights.to(q.dtype) @ far[:, None, :last]
            sums[:, :last] += weights.sum((1, 2))
        kept = len(self.after)
        chosen = sums.masked_fill(at >= self.recent, float("inf")).topk(kept).indices.sort().values
        stay = chosen.T  # [kept, kv_heads]
        slots = self.after.unsqueeze(1).expand(-1, shared)
        layer.put(slots, *(_of_heads(x, stay) for x in (near, far)), at.T.gather(0, stay), sums.T.gather(0, stay))
        return out.permute(2, 0, 1, 3).reshape(count, q.shape[1], -1)


class HeavyCore:
    """The attention core of one iteration under a budget (:class:`~meshwright.run.parts.Pass`'s ``core``)."""

    def __init__(self, kv: HeavyBlocks, rows: Sequence[PackedRow]):
        self.kv = kv
        self.rounds = self._rounds(rows)

    def __call__(self, module: HeadsCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from q [1, n, heads, d] to what the sequences keep, and to k and v [1, n, kv_heads, d]."""
        kv, place, said = self.kv, self.kv.place[id(module)], module.said
        held = (kept[place].flatten(0, 1) for kept in (kv.keys, kv.values, kv.positions, kv.sums))
        layer = _Layer(*held, said["scale"], said["cap"] or 0.0, module.spec.window)
        q, k, v = q[0], k[0], v[0]
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        for parts in self.rounds:
            for part in parts:
                out[part.rows] = part.attend(layer, q[part.rows], k[part.rows], v[part.rows])
        return out.unsqueeze(0)

    def _rounds(self, rows: Sequence[PackedRow]) -> list[list[_Prompt | _Singles]]:
        """Return who attends when: a prompt's tokens together, then those of an answer each behind the one before."""
        first, rounds, singles = 0, [[]], {}
        for row in rows:
            begun = max(0, min(row.new, row.prompt - row.past))
            if begun > 1:
                rounds[0].append(self._prompt(row, first, begun))
            begun = begun if begun > 1 else 0
            for at in range(begun, row.new):
                singles.setdefault(at - begun + (begun > 0), []).append((row, row.past + at, first + at))
            first += row.new
        for turn in sorted(singles):
            while len(rounds) <= turn:
                rounds.append([])
            groups = alike(singles[turn], lambda one: -(-self._kept(one[1]) // self.kv.block))
            rounds[turn] += [self._singles(group) for group in groups]
        return rounds

    def _kept(self, tokens: int) -> int:
        return tokens_kept(tokens, self.kv.share)

    def _recent(self, tokens: int) -> int:
        """Return the first position of the last tokens, which stay."""
        return tokens - (self._kept(tokens) + 1) // 2

    def _slots(self, row: PackedRow, count: int) -> np.ndarray:
        """Return the first slots of a sequence's blocks."""
        at, size = np.arange(count), self.kv.block
        return np.asarray(row.table, np.int64)[at // size] * size + at % size

    def _prompt(self, row: PackedRow, first: int, new: int) -> _Prompt:
        end, device = row.past + new, self.kv.device
        after = torch.from_numpy(self._slots(row, self._kept(end))).to(device)
        slots = after[: self._kept(row.past)]
        return _Prompt(slice(first, first + new), row.past, slots, after, self._recent(end))

    def _singles(self, group: list[tuple[PackedRow, int, int]]) -> _Singles:
        counts = np.array([self._kept(past) for _, past, _ in group])
        slots = np.zeros((len(group), max(1, counts.max())), np.int64)
        free = np.full(len(group), -1)
        for i, (row, past, _) in enumerate(group):
            found = self._slots(row, self._kept(past + 1))
            slots[i, : counts[i]] = found[: counts[i]]
            if len(found) > counts[i]:
                free[i] = found[-1]
        held = np.arange(slots.shape[1]) < counts[:, None]
        recent = [self._recent(past + 1) for _, past, _ in group]
        rows, past = [one[2] for one in group], [one[1] for one in group]
        many = rows, past, slots, held, np.flatnonzero(held), free, recent
        return _Singles(*(torch.as_tensor(one, device=self.kv.device) for one in many))


class WholeCore:
    """The attention core of one text whose tokens all see what stands before them, as without a budget; nothing is
    kept of it."""

    def __call__(self, module: HeadsCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend among q [1, n, heads, d], k and v [1, n, kv_heads, d]."""
        count, window, mask = q.shape[1], module.spec.window, None
        if 0 < window < count:
            at = torch.arange(count, device=q.device)
            seen = (at <= at[:, None]) & (at > at[:, None] - window)
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        said = {"scale": module.said["scale"], "cap": module.said["cap"]}
        return attended(*heads, mask, causal=mask is None, **said).transpose(1, 2)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which attention is summed: that of the model, and no less than 32 bits."""
    return torch.promote_types(dtype, torch.float32)


def _taken(kept: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what lies in slots [n, wide]: [n, wide, kv_heads, d]."""
    return F.embedding(slots, kept.flatten(1)).unflatten(-1, kept.shape[1:])


def _of_heads(x: torch.Tensor, stay: torch.Tensor) -> torch.Tensor:
    """Return those of x [kv_heads, tokens, d] that stay [kept, kv_heads], by head: [kept, kv_heads, d]."""
    return x.transpose(0, 1).gather(0, stay.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
