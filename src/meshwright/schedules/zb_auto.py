"""zb-auto, ZB-1p and ZB-2p: the zero-bubble schedule found for given times and memory (see `search_zb`).

Qi et al., 2023 (arXiv 2401.10241, section 3). Parameters: ``t_f``, ``t_b``, ``t_w`` (a time, or a tuple with one
per rank) and ``t_comm`` in any one unit; ``keep_w``, the share of an activation that stays until the weight
gradient; and for ``zb-auto`` ``mem_limit``, the most activations on a rank (p unless said). ZB-1p and ZB-2p fix
it at p and 2p.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import Actions
from meshwright.schedules.family import Family, ScheduleShape

TIMES = {"t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_comm": 0.0, "keep_w": 1.0}

ONE_UNIT = "give all times in one unit, such as milliseconds"
HELP = dict.fromkeys(("t_f", "t_b", "t_w", "t_comm"), ONE_UNIT) | {
    "keep_w": "1 keeps the whole activation until the weight gradient",
    "mem_limit": "count activations of one stage and microbatch; 1F1B's first rank holds as many as there are ranks",
}


def order(name: str, times_p: int, shape: ScheduleShape) -> Actions:
    """See the module; `times_p` is the memory limit in units of p where the shape does not say it."""
    from meshwright.schedules.search_zb import search

    limit = {"mem_limit": times_p * shape.num_ranks} | {k: v for k, v in shape.params.items() if v is not None}
    return search(name, shape.num_ranks, shape.num_microbatches, **limit)


def rules(shape: ScheduleShape) -> list[Diagnostic]:
    """Times per rank must be as many as ranks, none negative; a rank must hold one activation."""
    p, found = shape.num_ranks, []
    least = dict.fromkeys(TIMES, 0.0) | {"mem_limit": 1.0}
    for key, value in shape.params.items():
        values = np.atleast_1d(np.asarray(value if value is not None else least[key], dtype=np.float64))
        one = key in ("t_comm", "keep_w")
        if values.shape not in ((1,), () if one else (p,)):
            found.append((key, value, "one number" if one else f"one number, or one for each of the {p} ranks"))
        elif (values < least[key]).any() or (key == "keep_w" and values[0] > 1.0):
            found.append((key, value, "a share, 0 to 1" if key == "keep_w" else f"{least[key]:g} or more"))
    return [
        Diagnostic(
            code="S014", message=f"{key}={value}: it must be {what}", place=f"schedule.{key} = {value}", help=HELP[key]
        )
        for key, value, what in found
    ]


FAMILIES = tuple(
    Family(
        name=name,
        aliases=aliases,
        title=title,
        paper="Qi et al., 2023, arXiv 2401.10241",
        placement="linear",
        splits_backward=True,
        vpps=(1,),
        order=partial(order, name, times_p),
        rules=rules,
        params=params,
    )
    for name, aliases, title, times_p, params in (
        ("zb-auto", (), "Zero bubble, searched for the times and memory", 1, TIMES | {"mem_limit": None}),
        ("zb-1p", ("zb1p",), "ZB-1p (searched, 1F1B's memory)", 1, TIMES),
        ("zb-2p", ("zb2p",), "ZB-2p (searched, twice the memory)", 2, TIMES),
    )
)
