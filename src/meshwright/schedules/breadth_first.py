"""Breadth-first looped pipeline: every microbatch through a rank's first stage, then its second, and so on.

Lamy-Poirier, 2022 (arXiv 2211.05953). Stages loop over the ranks as in interleaved 1F1B, but a rank finishes
a stage for all microbatches before the next one, so that with fully sharded parameters each stage is gathered
once per direction. Bubble (p - 1) / (vpp m) of the compute; all activations are kept.
"""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import BW, Actions, F
from meshwright.schedules.family import Family, ScheduleShape


def order(shape: ScheduleShape) -> Actions:
    """All forwards, chunk by chunk, then all backwards, last chunk first."""
    p, m, vpp = shape.num_ranks, shape.num_microbatches, shape.vpp
    chunk = np.repeat(np.arange(vpp), m)
    both = np.concatenate((chunk, vpp - 1 - chunk))
    rows = (p, len(both))
    return Actions.of(
        "breadth-first",
        np.broadcast_to(np.repeat([F, BW], m * vpp), rows),
        both[None, :] * p + np.arange(p)[:, None],
        np.broadcast_to(np.tile(np.arange(m), 2 * vpp), rows),
        num_stages=p * vpp,
        num_microbatches=m,
    )


FAMILIES = (
    Family(
        name="breadth-first",
        aliases=("looped-bf", "looped-bfs"),
        title="Breadth-first looped pipeline",
        paper="Lamy-Poirier, 2022, arXiv 2211.05953",
        placement="loop",
        splits_backward=False,
        default_vpp=2,
        order=order,
    ),
)
