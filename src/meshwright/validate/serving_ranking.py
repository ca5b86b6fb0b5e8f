"""Ranking of measured serving plans: whether the plan predicted fastest is the one that was.

Rows that are replicas of plans of one model under one trace and rate say so in their notes (``trace NAME; one replica
of 2DPx4TP``). A plan's time is the mean over its replicas' requests, from arrival to the last token: time to the first
token, and time per token for each of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshwright.validate.serving import ServingScore
from meshwright.validate.tables import number

_PLAN = re.compile(r"trace (?P<trace>\w+).*one replica of (?P<dp>\d+)DPx(?P<tp>\d+)TP")


def ranking(found: Iterable[tuple[dict[str, str], ServingScore]]) -> dict[str, float]:
    """Return in how many ``groups`` of two plans or more the best one was ``best_picked``, as a share, and the mean
    ``regret``: the measured time of the one picked over the best, minus 1."""
    groups: dict[tuple, dict[tuple, list[tuple[float, float]]]] = {}
    for row, score in found:
        said, output = _PLAN.search(row.get("notes", "")), number(row, "osl")
        if said is None or not output or score.tpot is None or score.ttft is None:
            continue
        rate = round((number(row, "rate_req_s") or 0.0) * int(said["dp"]), 6)
        key = (row["source"], row["hardware"], row["model"], row["precision"], said["trace"], rate)
        times = tuple(first + each * (output - 1) for first, each in zip(score.ttft, score.tpot))
        groups.setdefault(key, {}).setdefault((said["dp"], said["tp"]), []).append(times)
    compared = [plans for plans in groups.values() if len(plans) > 1]
    picked, regret = 0, 0.0
    for plans in compared:
        measured, predicted = ({plan: _mean(times, i) for plan, times in plans.items()} for i in range(2))
        chosen = min(predicted, key=predicted.__getitem__)
        best = min(measured.values())
        picked += measured[chosen] == best
        regret += measured[chosen] / best - 1
    if not compared:
        return {"groups": 0}
    return {"groups": len(compared), "best_picked": picked / len(compared), "regret": regret / len(compared)}


def _mean(times: list[tuple[float, float]], which: int) -> float:
    return sum(pair[which] for pair in times) / len(times)
