"""Search for a zero-bubble schedule under measured times and a memory limit: ZB-1p, ZB-2p and any other limit.

Qi et al., 2023 (arXiv 2401.10241, section 3) build schedules greedily under a few yes-or-no settings and keep
the best. Here the settings are finer: how far a rank may wait before its first backward, whether forwards may
hold off, and how long a wait must be, in weight gradients, to be filled before a forward and before a backward.
The handcrafted ZB-H1 and ZB-H2 compete where they fit, so the result is never worse than those.

Memory counts activations: a forward takes 1, its backward to the inputs frees ``1 - keep_w`` and its weight
gradient ``keep_w``. The paper's Table 1 gives keep_w = 32 h / (34 h + 5 a s) for a Transformer layer that
keeps its attention scores; 1.0, the default, holds the whole activation until the weight gradient.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from meshwright.schedules.actions import Actions, B, F, W
from meshwright.schedules.timing import cost, in_order_times, peak_in_flight
from meshwright.schedules.zb_h import by_hand

EARLY = (-1.0, 0.5, 0.0, 1.0)
"""Share of a forward that must fit before the first backward for it to run; -1: run while the rank is free."""
FILL = (0.0, 0.25, 0.5, 0.75, np.inf)
"""Waits longer than this many weight gradients are filled."""


def search(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    t_f: ArrayLike,
    t_b: ArrayLike,
    t_w: ArrayLike,
    t_comm: float = 0.0,
    mem_limit: ArrayLike,
    keep_w: float = 1.0,
) -> Actions:
    """The schedule of least cost found. Times are scalars or [num_ranks], in any one unit; ``mem_limit`` is the
    most activations a rank may hold, 1 or more, a scalar or [num_ranks].
    """
    from meshwright.schedules.zb_sweep import sweep

    p, m = num_ranks, num_microbatches
    time, limit = np.stack([np.broadcast_to(t, p) for t in (t_f, t_b, t_w, t_comm)]).astype(np.float64), np.empty(p)
    limit[:] = mem_limit
    best, chosen = np.inf, None
    for early, patient, fill_f, fill_b in product(EARLY, (False, True), FILL, FILL):
        found, kinds = sweep(time, m, limit, float(keep_w), early, patient, fill_f, fill_b, best)
        if found < best:
            best, chosen = found, kinds
    for ahead in (1, 2):
        handmade = by_hand(name, ahead, p, m)
        if (peak_in_flight(handmade, keep_w) <= limit).all():
            found = cost(handmade, *in_order_times(handmade, *time[:3], t_comm))
            if found < best:
                best, chosen = found, handmade.kind.reshape(p, -1)
    return from_kinds(name, chosen)


def from_kinds(name: str, kinds: np.ndarray) -> Actions:
    """Actions of a linear pipeline from the kinds of each rank's, uint8 [p, 3 m]; microbatches in order."""
    p, n = kinds.shape
    microbatch = np.empty(kinds.shape, dtype=np.int64)
    for kind in (F, B, W):
        mine = kinds == kind
        microbatch[mine] = np.tile(np.arange(n // 3), p)
    stage = np.broadcast_to(np.arange(p)[:, None], kinds.shape)
    return Actions.of(name, kinds, stage, microbatch, num_stages=p, num_microbatches=n // 3)
