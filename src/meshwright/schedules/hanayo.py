"""Hanayo: the pipeline as a wave that runs down the ranks and back up, once or more.

Liu et al., 2023 (arXiv 2308.15762). With w waves a rank holds 2 w stages and the turning points need no
transfer, so Chimera's small bubble is had without a second copy of the weights. In slots of one stage the
bubble is 2 (p - 1) whatever w is: (p - 1) / (w m) of the compute for equal forward and backward. A stage has
at most p microbatches in flight. One wave is ``vpp2``, two are ``vpp4``.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.slots import actions_of, wave


def order(shape: ScheduleShape) -> Actions:
    """See the module."""
    route = wave(shape.num_ranks, shape.vpp)[None, :]
    most = np.full_like(route, shape.num_ranks)
    return actions_of("hanayo", route, most, (np.arange(shape.num_microbatches),))


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """A wave goes down and back up: an even number of stages per rank."""
    if shape.vpp % 2 == 0:
        return []
    return [
        Diagnostic(
            code="S011",
            message=f"hanayo holds two stages on each rank for every wave, not vpp={shape.vpp}",
            place=f"schedule.vpp = {shape.vpp}",
            help="write vpp2 for one wave, vpp4 for two",
        )
    ]


FAMILIES = (
    Family(
        name="hanayo",
        aliases=("wave",),
        title="Hanayo (waves)",
        paper="Liu et al., 2023, arXiv 2308.15762",
        placement="wave",
        splits_backward=False,
        default_vpp=2,
        order=order,
        rules=rules,
    ),
)
