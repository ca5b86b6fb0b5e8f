"""Paged attention: keys and values in blocks, and the attention of an iteration over them.

An iteration packs tokens of many sequences behind one another. What it computes is written to the sequences' blocks
first; then those that compute one token attend together: on a processor where their blocks lie
(:mod:`meshwright.run.serve.direct`), else in groups of like length, whose blocks are gathered to rows of equal length
under a mask; and those that compute several attend one by one. Products of gathered blocks are torch's own
``scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.run.self_attention import HeadsCore
from meshwright.run.serve.direct import NextTokens, knows
from meshwright.run.serve.packed import PackedRow
from meshwright.run.serve.tables import BlockCopy, HostKey

T = TypeVar("T")

#: A sequence joins a group of shorter ones where it has at most so many times their blocks, and so many more.
TIMES, MORE = 1.5, 8


class _Together(NamedTuple):
    """Sequences that compute a token each: their ``rows`` of the packed tokens, ``blocks`` [n * wide] that are
    gathered, and the additive ``mask`` [n, 1, 1, keys], None where all of what is gathered is seen."""

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor | None


class _Alone(NamedTuple):
    """A sequence that computes tokens ``rows``: ``blocks`` that are gathered of it with the additive ``mask`` [new,
    keys]; no blocks where the tokens see one another alone."""

    rows: slice
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


class KvBlocks:
    """The keys and values of the layers of one rank: of each layer [blocks, block, kv_heads, d] twice, and copies of
    blocks on the host."""

    def __init__(self, modules: Sequence[HeadsCore], blocks: int, block: int, *, dtype, device):
        self.block, self.device = block, device
        self.place = {id(module): place for place, module in enumerate(modules)}
        self.keys, self.values = [], []  # zeros: what is masked is multiplied all the same, and must be numbers
        for module in modules:
            heads, width, value_width = kv_shape(module)
            for kept, d in ((self.keys, width), (self.values, value_width)):
                kept.append(zeros((blocks, block, heads, d), dtype, device))
        self.host: dict[HostKey, list[torch.Tensor]] = {}

    def copy(self, copies: Iterable[BlockCopy], dropped: Iterable[HostKey] = ()) -> None:
        """Make copies between device and host, in order; forget what is dropped."""
        for one in copies:
            at = torch.tensor(one.blocks, device=self.device)
            if one.out:
                self.host[one.key] = [kept.index_select(0, at).cpu() for kept in self.parts]
            else:
                for kept, saved in zip(self.parts, self.host.pop(one.key), strict=True):
                    kept.index_copy_(0, at, saved.to(self.device))
        for key in dropped:
            self.host.pop(key, None)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All that lies in blocks."""
        return (*self.keys, *self.values)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks on the device."""
        return sum(kept.numel() * kept.element_size() for kept in self.parts)


class PagedCore:
    """The attention core of one iteration (:class:`~meshwright.run.parts.Pass`'s ``core``)."""

    def __init__(self, kv: KvBlocks, rows: Sequence[PackedRow], dtype: torch.dtype):
        self.kv, self.rows, self.dtype = kv, rows, dtype
        self.slots = self._slots()
        self._plans: dict[tuple[int, bool], tuple[list[_Together | NextTokens], list[_Alone]]] = {}

    def __call__(self, module: HeadsCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from q [1, n, heads, d] to all that the sequences have, k and v [1, n, kv_heads, d] with it."""
        place, window = self.kv.place[id(module)], module.spec.window
        q, k, v = q[0], k[0], v[0]
        keys, values = self.kv.keys[place], self.kv.values[place]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots, k)
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots, v)
        said = {"scale": module.said["scale"], "cap": module.said["cap"]}
        direct = not said["cap"] and knows(q.dtype, q.device)
        if (window, direct) not in self._plans:
            self._plans[window, direct] = self._planned(window, direct)
        together, alone = self._plans[window, direct]
        if len(together) == 1 and not alone:
            return self._together(together[0], q, keys, values, said).unsqueeze(0)
        out = q.new_empty((*q.shape[:2], values.shape[-1]))
        for group in together:
            out[group.rows] = self._together(group, q[group.rows], keys, values, said)
        for one in alone:
            near, far = (k[one.rows], v[one.rows]) if one.blocks is None else _gathered(keys, values, one.blocks)
            mine, near, far = (x.transpose(0, 1).unsqueeze(0) for x in (q[one.rows], near, far))
            out[one.rows] = attended(mine, near, far, one.mask, causal=one.mask is None, **said)[0].transpose(0, 1)
        return out.unsqueeze(0)

    def _together(self, group: _Together | NextTokens, q, keys, values, said: dict[str, float]) -> torch.Tensor:
        """The attention of q [n, heads, d]: query heads that share a key are as queries of one head."""
        if isinstance(group, NextTokens):
            return group.attend(q, keys, values, said["scale"])
        count, heads, d = q.shape
        shared = keys.shape[2]
        near, far = _gathered(keys, values, group.blocks)
        near, far = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (near, far))
        mine = q.reshape(count, shared, heads // shared, d)
        return attended(mine, near, far, group.mask, causal=False, **said).reshape(count, heads, -1)

    def _slots(self) -> torch.Tensor:
        """The place of every packed token among all tokens of all blocks."""
        size, found = self.kv.block, []
        for row in self.rows:
            at = np.arange(row.past, row.past + row.new)
            table = np.asarray(row.table[row.past // size : (row.past + row.new - 1) // size + 1])
            found.append(table[at // size - row.past // size] * size + at % size)
        return torch.from_numpy(np.concatenate(found)).to(self.kv.device)

    def _planned(self, window: int, direct: bool) -> tuple[list[_Together | NextTokens], list[_Alone]]:
        """Return how keys are read where they lie (`direct`) or gathered, under a sliding window (0: none)."""
        size, first, single, alone = self.kv.block, 0, [], []
        for row in self.rows:
            if row.new == 1:
                length = row.past + 1
                begin = max(0, length - window) // size if window else 0
                single.append((-(-length // size) - begin, begin, first, row))
            else:
                alone.append(self._of_one(row, first, window))
            first += row.new
        if direct:
            return ([self._of_next(single, window)] if single else []), alone
        groups = alike(single, lambda one: one[0])
        if len(groups) == 1 and not alone:  # in the order of the packed tokens
            groups[0].sort(key=lambda one: one[2])
        return [self._of_group(group, window) for group in groups], alone

    def _of_next(self, single: list, window: int) -> NextTokens:
        found = []
        for count, begin, first, row in single:
            length = row.past + 1 - begin * self.kv.block
            found.append((first, row.table[begin : begin + count], max(0, length - window) if window else 0, length))
        return NextTokens(*zip(*found))

    def _of_group(self, group: list, window: int) -> _Together:
        size, wide = self.kv.block, max(one[0] for one in group)
        blocks = np.zeros((len(group), wide), np.int64)
        lengths, begins = np.empty(len(group), np.int64), np.empty(len(group), np.int64)
        for i, (count, begin, _, row) in enumerate(group):
            blocks[i, :count] = row.table[begin : begin + count]
            blocks[i, count:] = blocks[i, count - 1]
            lengths[i], begins[i] = row.past + 1, begin * size
        at = begins[:, None] + np.arange(wide * size)
        seen = at < lengths[:, None]
        if window:
            seen &= at >= (lengths - window)[:, None]
        rows = torch.tensor([one[2] for one in group], device=self.kv.device)
        return _Together(rows, torch.from_numpy(blocks.reshape(-1)).to(self.kv.device), self._mask(seen[:, None, None]))

    def _of_one(self, row: PackedRow, first: int, window: int) -> _Alone:
        rows, size = slice(first, first + row.new), self.kv.block
        if row.past == 0 and not 0 < window < row.new:
            return _Alone(rows, None, None)
        length = row.past + row.new
        begin = max(0, row.past + 1 - window) // size if window else 0
        end = -(-length // size)
        blocks = torch.tensor(row.table[begin:end], device=self.kv.device)
        keys, queries = np.arange(begin * size, end * size), np.arange(row.past, length)[:, None]
        seen = keys <= queries
        if window:
            seen &= keys > queries - window
        return _Alone(rows, blocks, self._mask(seen))

    def _mask(self, seen: np.ndarray) -> torch.Tensor | None:
        if seen.all():
            return None
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.kv.device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self.kv.device), float("-inf"))


def _gathered(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values [tokens, kv_heads, d] of blocks, one behind the other."""
    return tuple(F.embedding(blocks, kept.flatten(1)).view(-1, *kept.shape[2:]) for kept in (keys, values))


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """softmax(scale q k^T + mask) v of q [b, heads, n, d], k and v [b, kv_heads, keys, d]; a `cap` bounds the scores,
    as in Gemma 2, for which torch has no fused kernel on every device."""
    if not cap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=True
        )
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(scale / cap * (q @ k.transpose(-1, -2)))
    if mask is not None:
        scores = scores + mask
    elif causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


def alike(many: list[T], length: Callable[[T], int]) -> list[list[T]]:
    """Return sequences in groups of like lengths in blocks, the shortest first."""
    groups: list[list[T]] = []
    for one in sorted(many, key=length):
        if not groups or length(one) > TIMES * length(groups[-1][0]) + MORE:
            groups.append([])
        groups[-1].append(one)
    return groups


def kv_shape(module: HeadsCore) -> tuple[int, int, int]:
    """Return the heads of a layer's keys and values on this rank, and the widths of both; those of latent attention are
    expanded to all heads."""
    spec, size = module.spec, module.shared.tp.size
    heads = spec.heads if spec.kv_lora_rank else spec.kv_heads
    return max(1, heads // size), spec.head_dim, spec.v_head_dim


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a processor of memory that the system gives page by page, when a block is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
