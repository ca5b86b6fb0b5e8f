"""Choices judged: in each group of measured plans the one that a search would have taken, and how it came out.

The plan taken is the one that is predicted fastest among those that fit with a probability of at least 1 - risk. It
ran or ran out of memory; its regret is its measured time over the best measured, minus one; and the winner's curse is
by how much more it came out slower than predicted than the group's plans did on average (a mean of logarithms).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.validate.score import MIN_GROUP, Scored

#: The chance of running out of memory that a plan that is taken may have, unless another is said.
RISK = 0.05
#: Other plans of a group whose predicted gain over the one taken is compared with the measured one: those within this.
NEAR = 0.3


def choices(scored: Iterable[Scored], risk: float = RISK) -> dict[str, float]:
    """Return the figures of choices over all groups of rows of steps that have labels of memory or times."""
    groups: dict[tuple[str, ...], list[Scored]] = {}
    for s in scored:
        if s.group and not s.faulty and s.oom is not None and (s.oom[0] or s.time is not None):
            groups.setdefault(s.group, []).append(s)
    compared = [rows for rows in groups.values() if len(rows) >= MIN_GROUP and any(not s.oom[0] for s in rows)]
    ran, regrets, curses = [], [], []
    realised = predicted = 0.0
    for rows in compared:
        could = [s for s in rows if s.p_fit >= 1 - risk]
        if not could:
            continue
        taken = min(could, key=lambda s: s.predicted_s)
        ran.append(not taken.oom[0])
        if taken.time is None:
            continue
        pairs = np.log([s.time for s in rows if s.time is not None])
        mine = np.log(taken.time)
        regrets.append(float(np.exp(mine[0] - pairs[:, 0].min()) - 1))
        curses.append(float((mine[0] - mine[1]) - (pairs[:, 0] - pairs[:, 1]).mean()))
        gain = pairs - mine
        near = (gain[:, 1] > 0) & (gain[:, 1] < NEAR)
        realised += float((gain[near, 0] * gain[near, 1]).sum())
        predicted += float((gain[near, 1] ** 2).sum())
    if not ran:
        return {}
    found = {"groups": len(compared), "chosen": len(ran), "ran": float(np.mean(ran)), "risk": risk}
    if regrets:
        found |= {"regret_mean": float(np.mean(regrets)), "regret_median": float(np.median(regrets))}
        found |= {"winners_curse": float(np.mean(curses))}
    if predicted:
        found["gain_realised"] = realised / predicted
    return found
