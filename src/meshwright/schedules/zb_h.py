"""ZB-H1 and ZB-H2: one forward, one backward to the inputs, and the weight gradients where they fill bubbles.

Qi et al., 2023 (arXiv 2401.10241, section 2): the two handcrafted schedules. Rank r of p runs c (p - r - 1)
forwards before it alternates F and B, with c = 1 for H1 and 2 for H2, and holds back its first c r weight
gradients, so that every rank keeps the same number of activations: p for H1 (what 1F1B's first rank keeps)
and 2p - 1 for H2. With T_F = T_B = T_W the bubble is a third of 1F1B's for H1 and none for H2.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from meshwright.schedules.actions import Actions, B, F, W
from meshwright.schedules.family import Family, ScheduleShape


def by_hand(name: str, ahead: int, num_ranks: int, num_microbatches: int) -> Actions:
    """The actions with `ahead` = c. Each action's place is the turn it belongs to, three places a turn."""
    p, m = num_ranks, num_microbatches
    rank, item = np.arange(p)[:, None], np.arange(m)[None, :]
    warmup, held = ahead * (p - 1 - rank), ahead * rank
    # Turn t runs F of microbatch warmup + t, B of t, W of t - held; warm-up forwards have negative turns.
    place = np.concatenate((3 * (item - warmup), np.broadcast_to(3 * item + 1, (p, m)), 3 * (item + held) + 2), axis=1)
    by_place = np.argsort(place, axis=1)
    kind = np.broadcast_to(np.repeat([F, B, W], m), place.shape)
    return Actions.of(
        name,
        np.take_along_axis(kind, by_place, axis=1),
        np.broadcast_to(rank, place.shape),
        by_place % m,
        num_stages=p,
        num_microbatches=m,
    )


def order(name: str, ahead: int, shape: ScheduleShape) -> Actions:
    """See the module."""
    return by_hand(name, ahead, shape.num_ranks, shape.num_microbatches)


PAPER = "Qi et al., 2023, arXiv 2401.10241"

FAMILIES = tuple(
    Family(
        name=name,
        aliases=(name.replace("-", ""),),
        title=title,
        paper=PAPER,
        placement="linear",
        splits_backward=True,
        vpps=(1,),
        order=partial(order, name, ahead),
    )
    for name, title, ahead in (
        ("zb-h1", "ZB-H1 (zero bubble, 1F1B's memory)", 1),
        ("zb-h2", "ZB-H2 (zero bubble, twice the memory)", 2),
    )
)
