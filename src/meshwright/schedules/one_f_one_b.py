"""1F1B: after a short warm-up each rank alternates one forward and one backward.

PipeDream-Flush, Narayanan et al., 2021 (arXiv 2006.09503), and DAPPLE, Fan et al., 2021 (arXiv 2007.01045).
The bubble is GPipe's, (p - 1) / (m + p - 1), but rank r keeps only min(p - r, m) activations.
"""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.weave import one_f_one_b


def order(shape: ScheduleShape) -> Actions:
    """Rank r runs p - r - 1 forwards, then alternates."""
    p, m = shape.num_ranks, shape.num_microbatches
    kind, microbatch = one_f_one_b(np.arange(p)[::-1], np.arange(m), np.arange(m))
    stage = np.broadcast_to(np.arange(p)[:, None], kind.shape)
    return Actions.of("1f1b", kind, stage, microbatch, num_stages=p, num_microbatches=m)


FAMILIES = (
    Family(
        name="1f1b",
        aliases=("pipedream-flush", "dapple"),
        title="1F1B (PipeDream-Flush, DAPPLE)",
        paper="Narayanan et al., 2021, arXiv 2006.09503; Fan et al., 2021, arXiv 2007.01045",
        placement="linear",
        splits_backward=False,
        vpps=(1,),
        order=order,
    ),
)
