"""The pattern most schedules share: some forwards first, then forward and backward in turn, then the other backwards.

Each rank has n forwards and n backwards, each in an order of its own. After ``warmup`` forwards it alternates
one forward, one backward; when the forwards run out only backwards remain.
"""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import BW, F


def one_f_one_b(warmup: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Columns (kind, item) woven per rank, as an array [2, ranks, 2 n].

    ``warmup`` int [ranks]: forwards before the first backward, less one (the alternation starts with a
    forward), at most n. ``forward`` and ``backward`` int [n] or [ranks, n]: what each slot works on.
    """
    num_ranks, n = len(warmup), forward.shape[-1]
    ahead = np.minimum(warmup, n)[:, None]
    slot = np.arange(n)[None, :]
    f_place = np.where(slot < ahead, slot, 2 * slot - ahead)
    b_place = np.where(slot < n - ahead, ahead + 2 * slot + 1, n + slot)
    woven = np.empty((2, num_ranks, 2 * n), dtype=np.int64)
    row = np.arange(num_ranks)[:, None]
    woven[0, row, f_place], woven[1, row, f_place] = F, forward
    woven[0, row, b_place], woven[1, row, b_place] = BW, backward
    return woven
