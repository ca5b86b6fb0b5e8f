"""DualPipe and DualPipeV: forwards and backwards of two pipelines in pairs, so that one hides the other's transfers.

DeepSeek-AI, 2024 (arXiv 2412.19437, section 3.2.1; orders as in their open implementation, DualPipeV after Sea AI
Lab's "cut-in-half"). DualPipe runs two pipelines through the same ranks, one each way; DualPipeV folds them into
one V on half the ranks, where rank r of p holds stages r and 2p - 1 - r. In the main phase each forward is followed
by the full backward of the other stage: an executor that overlaps the two takes the pair as a unit. Weight
gradients are split off only where they fill a bubble. With s stages a rank keeps at most s + 1 activations. The
authors count a bubble of (s / 2 - 1) (T_pair + T_backward - 3 T_W), both results of a pair coming at its end; one
after the other, with F, B and W of one slot each, the bubble is s / 2 - 1 slots.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.phases import unfold, v_shaped

PAPER = "DeepSeek-AI, 2024, arXiv 2412.19437"


def phases(num_ranks: int, num_microbatches: int, rank: int) -> list[tuple[int, str]]:
    """One rank's phases in the V, for 2p microbatches or more."""
    above, turns = num_ranks - rank - 1, rank + 1
    # The last backwards alternate stages 1 and 0; the second half of them leave their weight gradients for later.
    tail = [(1, f"{'BW' if place < turns else 'B'}{1 - place % 2}") for place in range(2 * turns)]
    return [
        (2 * above, "F0"),
        (turns, "F0 F1"),
        (above, "B1 W F1"),
        (num_microbatches - 2 * num_ranks + turns, "F0 BW1 F1 BW0"),
        (above, "BW1 F1 BW0"),
        *tail,
        (above, "W B0"),
        (turns, "W"),
    ]


def order_v(shape: ScheduleShape) -> Actions:
    """DualPipeV."""
    p, m = shape.num_ranks, shape.num_microbatches
    return v_shaped("dualpipev", [phases(p, m, rank) for rank in range(p)], m)


def order(shape: ScheduleShape) -> Actions:
    """DualPipe: rank r and its mirror image both run the V's rank min(r, p - 1 - r), for one way and the other.

    The first half of the microbatches goes down the ranks, the rest up.
    """
    p, half = shape.num_ranks, shape.num_microbatches // 2
    rows = []
    for rank in range(p):
        near = min(rank, p - 1 - rank)
        kind, chunk, index = unfold(phases(p // 2, half, near))
        # Stage 0 of the V is this end's own way in, stage 1 the other way's end.
        goes_down = (chunk == 0) == (rank < p // 2)
        rows.append((kind, np.where(chunk == 0, near, p - 1 - near), np.where(goes_down, index, half + index)))
    return Actions.of("dualpipe", *zip(*rows), num_stages=p, num_microbatches=shape.num_microbatches)


def _enough(shape: ScheduleShape, least: int) -> list[Diagnostic]:
    if shape.num_microbatches >= least:
        return []
    return [
        Diagnostic(
            code="S013",
            message=f"{shape.num_microbatches} microbatches do not fill the pairs of pp={shape.num_ranks}: "
            f"at least {least} are needed",
            place=f"schedule.num_microbatches = {shape.num_microbatches}",
            help=f"use {least} microbatches or more, fewer ranks, or `zb-v`, which takes any number",
        )
    ]


def rules_v(shape: ScheduleShape) -> list[Diagnostic]:
    """A microbatch for each stage."""
    return _enough(shape, shape.num_stages)


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """Halves of both ranks and microbatches, and a microbatch for each stage and way."""
    from meshwright.schedules.two_way import rules as halves

    return halves(shape) + _enough(shape, 2 * shape.num_ranks)


FAMILIES = (
    Family(
        name="dualpipe",
        title="DualPipe (two-way)",
        paper=PAPER,
        placement="bidirectional",
        splits_backward=True,
        hides_experts=True,
        vpps=(1,),
        order=order,
        rules=rules,
    ),
    Family(
        name="dualpipev",
        aliases=("dualpipe-v",),
        title="DualPipeV",
        paper=PAPER,
        placement="v",
        splits_backward=True,
        hides_experts=True,
        default_vpp=2,
        vpps=(2,),
        order=order_v,
        rules=rules_v,
    ),
)
