"""GPipe: every forward, then every backward in the opposite order.

Huang et al., 2019 (arXiv 1811.06965). Bubble (p - 1) / (m + p - 1); every rank keeps all m activations.
"""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import BW, Actions, F
from meshwright.schedules.family import Family, ScheduleShape


def order(shape: ScheduleShape) -> Actions:
    """All ranks do the same: F0 .. Fm-1, Bm-1 .. B0."""
    p, m = shape.num_ranks, shape.num_microbatches
    one = np.arange(m)
    return Actions.of(
        "gpipe",
        np.broadcast_to(np.repeat([F, BW], m), (p, 2 * m)),
        np.broadcast_to(np.arange(p)[:, None], (p, 2 * m)),
        np.broadcast_to(np.concatenate((one, one[::-1])), (p, 2 * m)),
        num_stages=p,
        num_microbatches=m,
    )


FAMILIES = (
    Family(
        name="gpipe",
        title="GPipe",
        paper="Huang et al., 2019, arXiv 1811.06965",
        placement="linear",
        splits_backward=False,
        vpps=(1,),
        order=order,
    ),
)
