"""Interleaved 1F1B: each rank holds vpp chunks, p stages apart, and works through the microbatches in groups.

Narayanan et al., 2021 (arXiv 2104.04473, section 2.2); the same order is the depth-first looped pipeline of
Lamy-Poirier, 2022 (arXiv 2211.05953). A group of microbatches goes through chunk 0, then chunk 1, and so on,
before the next group starts; the paper's group is p, and ``group`` makes it larger. The bubble is
(p - 1) / (vpp m) of the compute, against (p - 1) / m for 1F1B.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.weave import one_f_one_b


def group_order(num_microbatches: int, vpp: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(chunk, microbatch) of every forward in order, int [m vpp] each; the last group may be smaller."""
    item = np.arange(num_microbatches * vpp)
    start = item // (group * vpp) * group
    size = np.minimum(group, num_microbatches - start)
    chunk, offset = np.divmod(item - start * vpp, size)
    return chunk, start + offset


def order(shape: ScheduleShape) -> Actions:
    """Rank r runs 2 (p - r - 1) + (vpp - 1) group forwards, then alternates; backwards take the last chunk first.

    One chunk per rank is plain 1F1B, as in Megatron.
    """
    p, m, vpp = shape.num_ranks, shape.num_microbatches, shape.vpp
    group = shape.params["group"] or p
    chunk, microbatch = group_order(m, vpp, group)
    rank = np.arange(p)[:, None]
    ahead = p - 1 - rank[:, 0]
    warmup = ahead if vpp == 1 else 2 * ahead + (vpp - 1) * group
    # One integer per (chunk, microbatch), so that one weave orders both.
    kind, item = one_f_one_b(warmup, chunk * m + microbatch, (vpp - 1 - chunk) * m + microbatch)
    return Actions.of("interleaved", kind, item // m * p + rank, item % m, num_stages=p * vpp, num_microbatches=m)


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """The last group, like every other, must fill the pipeline: p microbatches or more."""
    p, m = shape.num_ranks, shape.num_microbatches
    group = shape.params["group"] or p
    if shape.vpp == 1 or (p <= group <= m and (m % group == 0 or m % group >= p)):
        return []
    fitting = [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]
    multiples = sorted({max(m // p, 1) * p, -(-m // p) * p})
    either = f"; or microbatches in groups of {_some(fitting)} (`group`)" if fitting else ""
    return [
        Diagnostic(
            code="S013",
            message=f"interleaved with pp={p}, vpp={shape.vpp} runs {m} microbatches in groups of {group}: "
            + (f"the last has {m % group}" if group <= m and group >= p else f"a group is {p} to {m} microbatches")
            + f", and fewer than pp={p} leave ranks waiting for each other",
            place=f"schedule.num_microbatches = {m}",
            help=f"take {' or '.join(map(str, multiples))} microbatches{either}; or `breadth-first`, which takes any",
        )
    ]


def _some(values: list[int]) -> str:
    return ", ".join(map(str, values[:6])) + (", ..." if len(values) > 6 else "")


FAMILIES = (
    Family(
        name="interleaved",
        aliases=("1f1b-i", "1f1b-interleaved", "depth-first", "looped-df"),
        title="Interleaved 1F1B",
        paper="Narayanan et al., 2021, arXiv 2104.04473; Lamy-Poirier, 2022, arXiv 2211.05953",
        placement="loop",
        splits_backward=False,
        default_vpp=2,
        order=order,
        rules=rules,
        params={"group": None},
    ),
)
