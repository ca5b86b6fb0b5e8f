"""DualPipeV: DualPipe cut in half; a V of two stages per rank whose forwards and backwards run in pairs.

DeepSeek-AI, 2024 (arXiv 2412.19437, DualPipe) and Sea AI Lab's "cut-in-half" of it. Rank r of p holds stages
r and 2p - 1 - r and keeps at most 2p + 1 of their activations. In the main phase each forward of one stage
is followed by the full backward of the other; an executor that overlaps one's communication with the other's
computation takes the pair as a unit. Weight gradients are split off only where they fill a bubble.
"""

from __future__ import annotations

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, Shape
from meshwright.schedules.phases import v_shaped


def phases(num_ranks: int, num_microbatches: int, rank: int) -> list[tuple[int, str]]:
    """One rank's phases, for 2p microbatches or more."""
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


def order(shape: Shape) -> Actions:
    """See the module."""
    p, m = shape.num_ranks, shape.num_microbatches
    return v_shaped("dualpipev", [phases(p, m, rank) for rank in range(p)], m)


def rules(shape: Shape) -> list[Diagnostic]:
    """At least one microbatch for each stage."""
    if shape.num_microbatches >= shape.num_stages:
        return []
    return [
        Diagnostic(
            code="S013",
            message=f"dualpipev with pp={shape.num_ranks} (two stages each) runs {shape.num_microbatches} "
            f"microbatches; it needs {shape.num_stages} or more",
            place=f"schedule.num_microbatches = {shape.num_microbatches}",
            help=f"use {shape.num_stages} microbatches or more, fewer ranks, or `zb-v`, which takes any number",
        )
    ]


FAMILIES = (
    Family(
        name="dualpipev",
        aliases=("dualpipe-v",),
        title="DualPipeV",
        paper="DeepSeek-AI, 2024, arXiv 2412.19437",
        placement="v",
        splits_backward=True,
        default_vpp=2,
        vpps=(2,),
        order=order,
        rules=rules,
    ),
)
