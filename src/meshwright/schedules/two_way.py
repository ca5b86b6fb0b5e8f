"""Chimera and BitPipe: two pipelines through the same ranks, one each way, that fill each other's bubbles.

Chimera: Li and Hoefler, 2021 (arXiv 2107.06925). Every rank holds a stage of the pipeline going down and one of
the pipeline going up, so the weights are kept twice. Of every p microbatches half go each way; more than p are
concatenated. In slots of one stage the bubble is p - 2, against 2 (p - 1) for 1F1B.

BitPipe: Wu et al., 2024 (arXiv 2410.19367). Both pipelines are V-shaped with two stages per rank, each half as
large, which halves the bubble's time: p - 2 slots of half a stage.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.slots import actions_of, both_ways, wave


def order(name: str, shape: ScheduleShape) -> Actions:
    """See the module. A stage has at most half a unit in flight, and no more than it takes to reach the loss."""
    p = shape.num_ranks
    down = wave(p, shape.vpp)
    to_loss = np.arange(shape.num_stages, 0, -1)
    most = np.broadcast_to(np.minimum(p // 2, to_loss), (2, shape.num_stages))
    return actions_of(name, np.stack((down, p - 1 - down)), most, both_ways(shape.num_microbatches, p))


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """Both ways need the same: an even number of ranks and of microbatches."""
    counts = {"num_ranks": ("pp", shape.num_ranks), "num_microbatches": ("microbatches", shape.num_microbatches)}
    return [
        Diagnostic(
            code="S013",
            message=f"a pipeline that runs both ways splits ranks and microbatches in halves; {word}={count} is odd",
            place=f"schedule.{key} = {count}",
            help=f"take {max(count - 1, 2)} or {count + 1}",
        )
        for key, (word, count) in counts.items()
        if count % 2
    ]


FAMILIES = tuple(
    Family(
        name=name,
        title=title,
        paper=paper,
        placement="bidirectional",
        splits_backward=False,
        default_vpp=vpp,
        vpps=(vpp,),
        order=partial(order, name),
        rules=rules,
    )
    for name, title, paper, vpp in (
        ("chimera", "Chimera (two-way)", "Li and Hoefler, 2021, arXiv 2107.06925", 1),
        ("bitpipe", "BitPipe (two-way, V-shaped)", "Wu et al., 2024, arXiv 2410.19367", 2),
    )
)
