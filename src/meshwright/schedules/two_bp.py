"""2BP: any schedule with its backward in two, and the weight gradients where a rank would wait, or last.

Rae et al., 2024 (arXiv 2405.18047): "backward-p1" (B) keeps the order of the schedule, so gradients move on
sooner; "backward-p2" (W) is delayed. Ranks keep the activations of delayed weight gradients meanwhile: memory
grows towards all m. With equal times the bubble of GPipe falls from 3 (p - 1) slots to 2 (p - 1), that of 1F1B
with p microbatches to p - 1. A weight gradient that the schedule already places stays where it is.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.schedules.actions import BW, Actions, B, W
from meshwright.schedules.family import Family

PAPER = "Rae et al., 2024, arXiv 2405.18047"


def fill(actions: Actions, name: str, most: int | None = None) -> Actions:
    """Every full backward as B, its W in a wait of a slot or more, before a forward that would make the rank hold
    more than ``most`` activations, or last."""
    from meshwright.schedules.fill_loop import SETTLED, run_fill

    placed = np.zeros((actions.num_stages, actions.num_microbatches), dtype=bool)
    w = actions.kind == W
    placed[actions.stage[w], actions.microbatch[w]] = True
    kind = np.where(actions.kind == BW, B, actions.kind)
    kind[(kind == B) & placed[actions.stage, actions.microbatch]] = SETTLED
    shape = {"num_stages": actions.num_stages, "num_microbatches": actions.num_microbatches}
    columns, rank_ptr = run_fill(actions, kind, len(actions) if most is None else most)
    columns[0, columns[0] == SETTLED] = B
    rows = [np.split(column, rank_ptr[1:-1]) for column in columns]
    return Actions.of(name, *rows, **shape)


def split(actions: Actions) -> Actions:
    """2BP over `actions`; they come back the same where no backward is full."""
    return fill(actions, f"2bp:{actions.name}")


def family_over(family: Family) -> Family:
    """The family ``2bp:NAME``: the legal shapes of NAME, its order split."""
    return msgspec.structs.replace(
        family,
        name=f"2bp:{family.name}",
        aliases=(),
        title=f"2BP over {family.title}",
        paper=f"{PAPER}; {family.paper}",
        splits_backward=True,
        order=lambda shape: split(family.order(shape)),
    )
