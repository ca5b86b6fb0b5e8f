"""ZB-V: two stages on each rank in a V, down and back up, and weight gradients that fill every bubble.

Qi et al., 2023 (arXiv 2401.10241, section 6): the handcrafted order for T_F = T_B = T_W, where it has no
bubble at 1F1B's memory: rank r holds stages r and 2p - 1 - r, each half as large as 1F1B's, and keeps at most
2p of their activations. Fewer than 2p - 1 microbatches run the same order with the missing ones left out.
"""

from __future__ import annotations

from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape
from meshwright.schedules.phases import v_shaped


def phases(num_ranks: int, num_microbatches: int, rank: int) -> list[tuple[int, str]]:
    """One rank's phases, for 2p - 1 microbatches or more."""
    above = num_ranks - rank
    # Forwards of stage 0 before the steady phase; the rest of them run in its first turns.
    begun = 2 * above - 1 + rank
    fresh = num_microbatches - begun
    return [
        (2 * above - 1, "F0"),
        (rank, "F1 F0"),
        (above, "F1 B1 W1"),
        (fresh, "F0 B0 W0 F1 B1 W1"),
        (num_microbatches - num_ranks - fresh, "B0 W0 F1 B1 W1"),
        (rank, "B0 B1"),
        (above, "B0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]


def order(shape: ScheduleShape) -> Actions:
    """See the module."""
    p, m = shape.num_ranks, shape.num_microbatches
    full = max(2 * p - 1, m)
    return v_shaped("zb-v", [phases(p, full, rank) for rank in range(p)], m)


FAMILIES = (
    Family(
        name="zb-v",
        aliases=("zbv",),
        title="ZB-V (zero bubble, V-shaped)",
        paper="Qi et al., 2023, arXiv 2401.10241",
        placement="v",
        splits_backward=True,
        default_vpp=2,
        vpps=(2,),
        order=order,
    ),
)
