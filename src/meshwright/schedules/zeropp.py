"""ZeroPP: units of microbatches that go block by block through looped stages, with weight gradients in the waits.

Tang et al., 2024 (arXiv 2402.03791). The microbatches are cut into units; within a unit a rank takes a stage for
every microbatch of the unit before its next stage, forward through all its stages and then backward, so that
fully sharded parameters are gathered once per stage, direction and unit. The first backwards start while the
last stage's forwards still run, as in ZB-H2, and weight gradients run where the rank would wait, across units
too. ``unit`` microbatches form a unit: 2p - 1 unless said, just enough for rank 0 to be busy until its first
backward. A rank holds at most ``unit`` activations of each of its stages.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.interleaved import group_order
from meshwright.schedules.two_bp import fill
from meshwright.schedules.weave import one_f_one_b


def unit_of(shape: ScheduleShape) -> int:
    """Microbatches per unit."""
    return shape.params["unit"] or 2 * shape.num_ranks - 1


def order(shape: ScheduleShape) -> Actions:
    """Unit by unit, forwards and backwards woven on the last stage; then the weight gradients put in."""
    p, m, vpp, unit = shape.num_ranks, shape.num_microbatches, shape.vpp, unit_of(shape)
    rank = np.arange(p)[:, None]
    units = []
    for start in range(0, m, unit):
        size = min(unit, m - start)
        chunk, offset = group_order(size, vpp, size)
        warmup = (vpp - 1) * size + np.minimum(2 * (p - 1 - rank[:, 0]), size)
        microbatch = start + offset
        # One integer per (chunk, microbatch), so that one weave orders both.
        units.append(one_f_one_b(warmup, chunk * m + microbatch, (vpp - 1 - chunk) * m + microbatch))
    kind, item = np.concatenate(units, axis=2)
    blocks = Actions.of("zeropp", kind, item // m * p + rank, item % m, num_stages=p * vpp, num_microbatches=m)
    return fill(blocks, "zeropp", most=vpp * unit)


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """A unit has at least one microbatch."""
    if unit_of(shape) >= 1:
        return []
    return [
        Diagnostic(
            code="S010",
            message=f"unit={unit_of(shape)} for zeropp: at least 1 microbatch is needed",
            place=f"schedule.unit = {unit_of(shape)}",
            help=f"leave it out for 2 p - 1 = {2 * shape.num_ranks - 1}",
        )
    ]


FAMILIES = (
    Family(
        name="zeropp",
        title="ZeroPP (units, block by block)",
        paper="Tang et al., 2024, arXiv 2402.03791",
        placement="loop",
        splits_backward=True,
        default_vpp=2,
        order=order,
        rules=rules,
        params={"unit": None},
    ),
)
