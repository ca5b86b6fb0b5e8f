"""The attention of next tokens on a processor, which reads keys and values where they lie.

torch's ``scaled_dot_product_attention`` wants those of all sequences gathered to rows of equal length, under a mask:
on one core, 16 sequences of 400 tokens (8 heads of 64, float32) take it and what gathers for it 7.8 times as long as
this loop, which reads every block once, and 1.2 times where four heads share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit

#: What the compiler may do to sums so that it computes eight or sixteen numbers at a time.
FAST = {"reassoc", "contract", "nsz", "arcp"}
#: Numbers that a thread multiplies at least, so that waking it is worth while.
THREAD = 1 << 20


class NextTokens:
    """Sequences that compute a token each: the ``rows`` of the packed tokens, their ``blocks`` one behind the other
    from ``ptr`` on, and the first (``begin``) and the last token and one (``end``) that each attends to, counted from
    its first block on."""

    def __init__(self, rows: Sequence[int], tables: Sequence[Sequence[int]], begin: Sequence[int], end: Sequence[int]):
        self.rows = torch.tensor(rows)
        self.blocks = np.concatenate([np.asarray(table, np.int64) for table in tables])
        self.ptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
        self.begin, self.end = np.asarray(begin, np.int64), np.asarray(end, np.int64)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """softmax(scale q k^T) v of q [n, heads, d] over keys [blocks, block, kv_heads, d] and values [blocks, block,
        kv_heads, e]: [n, heads, e]."""
        count, heads, _ = q.shape
        out = q.new_empty((count, heads, values.shape[-1]))
        lengths = self.end - self.begin
        work, threads = int(lengths.sum()) * heads * q.shape[-1], torch.get_num_threads()
        said = (q.contiguous().numpy(), keys.numpy(), values.numpy(), self.blocks, self.ptr, self.begin, self.end)
        said = (*said, q.numpy().dtype.type(scale), int(self.end.max()), out.numpy())
        parts = min(threads, count, 1 + work // THREAD)
        if parts == 1:
            _attend(*said, 0, count)
            return out
        cuts = np.searchsorted(np.cumsum(lengths), np.linspace(0, lengths.sum(), parts + 1)[1:-1])
        cuts = [0, *cuts.tolist(), count]
        others = [_pool(threads).submit(_attend, *said, *cuts[i : i + 2]) for i in range(1, parts)]
        _attend(*said, *cuts[:2])
        for one in others:
            one.result()
        return out


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


def knows(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the loop computes in a type on a device."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _attend(q, keys, values, blocks, ptr, begin, end, scale, most, out, first, last):
    """The attention of the sequences from `first` to before `last`; none reaches beyond token `most`. Tokens are read
    in the order in which they lie, each for all heads."""
    heads, width, size = q.shape[1], q.shape[2], keys.shape[1]
    shared, value_width = keys.shape[2], values.shape[3]
    each, scores, none = heads // shared, np.empty((heads, most), q.dtype), scale * 0
    for i in range(first, last):
        low, high = begin[i], end[i]
        for b in range(low // size, (high + size - 1) // size):
            block, before = keys[blocks[ptr[i] + b]], b * size
            for t in range(max(low - before, 0), min(size, high - before)):
                for head in range(heads):
                    query, key, score = q[i, head], block[t, head // each], none
                    for c in range(width):
                        score += query[c] * key[c]
                    scores[head, before + t] = score * scale
        for head in range(heads):
            mine, total = scores[head, low:high], none
            largest = mine.max()
            for k in range(len(mine)):
                mine[k] = np.exp(mine[k] - largest)
                total += mine[k]
            for k in range(len(mine)):
                mine[k] /= total
        out[i] = none
        for b in range(low // size, (high + size - 1) // size):
            block, before = values[blocks[ptr[i] + b]], b * size
            for t in range(max(low - before, 0), min(size, high - before)):
                for head in range(heads):
                    made, share, value = out[i, head], scores[head, before + t], block[t, head // each]
                    for c in range(value_width):
                        made[c] += share * value[c]
