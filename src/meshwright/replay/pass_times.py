"""Durations of a trace's passes, as another schedule needs them."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.replay.tasks import Rebuilt
from meshwright.schedules.actions import BW, Actions, B, F, W

NAMES = {F: "F", B: "B", W: "W", BW: "BW"}


class PassTimes(msgspec.Struct):
    """Measured times of a lane's passes in seconds: by (kind, stage) ``usual`` ones and ``edge``, those of the pass
    with exchanges (first F, last backward); by kind ``wait``, the host time in front of one."""

    usual: dict[tuple[str, int], float]
    edge: dict[tuple[str, int], float]
    wait: dict[str, float]


def measured(rebuilt: Rebuilt, ranks: list[int]) -> PassTimes:
    """Return the measured pass times of the ranks of a lane: means over microbatches."""
    mine = set(ranks)
    whole: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    waits: dict[str, list[float]] = defaultdict(list)
    begun: set[tuple] = set()
    for task, seconds, wait in zip(rebuilt.tasks, rebuilt.seconds.tolist(), rebuilt.wait_s.tolist()):
        if task.is_pass and task.ranks[0] in mine:
            whole[task.kind, task.stage][task.microbatch] += seconds
            key = (task.kind, task.stage, task.microbatch)
            if key not in begun:
                waits[task.kind].append(wait)
            begun.add(key)
    edge_of = _edges(rebuilt, mine)
    usual, edge = {}, {}
    for (kind, stage), by_microbatch in whole.items():
        special = edge_of.get((kind, stage))
        rest = [v for m, v in by_microbatch.items() if m != special]
        usual[kind, stage] = fmean(rest or by_microbatch.values())
        edge[kind, stage] = by_microbatch.get(special, usual[kind, stage])
    return PassTimes(usual=usual, edge=edge, wait={kind: fmean(found) for kind, found in waits.items()})


def _edges(rebuilt: Rebuilt, mine: set[int]) -> dict[tuple[str, int], int]:
    """Return the microbatch of the pass that each stage's exchanges are overlapped with, by (kind, stage)."""
    out: dict[tuple[str, int], int] = {}
    for task in rebuilt.tasks:
        for n in task.needs:
            before = rebuilt.tasks[n]
            if task.queue == "dp" and before.is_pass and before.ranks[0] in mine and before.stage == task.stage:
                out[before.kind, before.stage] = before.microbatch
            if before.queue == "dp_gather" and task.is_pass and task.ranks[0] in mine:
                out.setdefault((task.kind, task.stage), task.microbatch)
    return out


def resampled(p: PassTimes, share: NDArray[np.float64], weight_share: float | None, actions: Actions) -> PassTimes:
    """Seconds of the passes that the new schedule has, for its stages; `share` [new, old]."""
    wanted = {NAMES[k] for k in np.unique(actions.kind).tolist()}
    usual, edge = {}, {}
    for kind in wanted:
        for source, target in ((p.usual, usual), (p.edge, edge)):
            column = np.array([_one(source, kind, s, weight_share) for s in range(share.shape[1])])
            for stage, seconds in enumerate((share @ column).tolist()):
                target[kind, stage] = seconds
    wait = {k: p.wait.get(k, p.wait.get("BW", p.wait.get("B", 0.0))) for k in wanted}
    return PassTimes(usual=usual, edge=edge, wait=wait)


def _one(found: dict[tuple[str, int], float], kind: str, stage: int, weight_share: float | None) -> float:
    """Seconds of a pass of a stage, put together or taken apart where it was not measured as such."""
    if (kind, stage) in found:
        return found[kind, stage]
    if kind == "BW":
        return found["B", stage] + found["W", stage]
    if weight_share is None:
        cannot(
            "it has whole backwards, and the schedule splits them",
            "trace a schedule that splits them (zb-h1), or say --weight-share 0.5",
        )
    return found["BW", stage] * (weight_share if kind == "W" else 1 - weight_share)


def cannot(why: str, help: str) -> None:
    """Raises:
    MeshwrightError: X107.
    """
    raise MeshwrightError.one(
        "X107", f"the trace cannot say what another schedule takes: {why}", place="--schedule", help=help
    )
