"""How the time of a stage's pass is spread over its layers, to cut the same layers into other stages.

A backward beside which gradients are exchanged layer by layer tells when each layer was done: by its pieces in a
simulated timeline, by when the exchanges began in a measured one. Without that the layers of a stage are taken to be
alike.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from meshwright.replay.tasks import Rebuilt


def fractions(rebuilt: Rebuilt) -> dict[int, tuple[float, float]]:
    """Return the shares of its pass that had run when each piece began and ended, by its number."""
    pieces: dict[tuple, list[int]] = defaultdict(list)
    for task in rebuilt.tasks:
        if task.is_pass:
            pieces[task.ranks[0], task.kind, task.stage, task.microbatch].append(task.number)
    out = {}
    for numbers in pieces.values():
        ends = np.cumsum(rebuilt.seconds[numbers])
        whole = float(ends[-1]) or 1.0
        for number, end, seconds in zip(numbers, ends.tolist(), rebuilt.seconds[numbers].tolist()):
            out[number] = max((end - seconds) / whole, 0.0), end / whole
    return out


def profiles(rebuilt: Rebuilt, num_stages: int, ended: dict[int, tuple[float, float]]) -> list[NDArray[np.float64]]:
    """For every stage the share of its time that each of its layers takes, in forward order; one of them where it is
    not known. `ended` is how much of its pass had run when each piece began and ended."""
    done: dict[int, dict[int, float]] = defaultdict(dict)
    for task in rebuilt.tasks:
        if task.queue == "dp" and task.stage >= 0 and task.layer >= 0:
            makers = [n for n in task.needs if n in ended and rebuilt.tasks[n].stage == task.stage]
            makers = [n for n in makers if rebuilt.tasks[n].kind in ("BW", "W")]
            if makers:
                at = max(ended[n][1] for n in makers)
                done[task.stage][task.layer] = max(done[task.stage].get(task.layer, 0.0), at)
    out = []
    for stage in range(num_stages):
        # the last layer is done first; what is left at the end belongs to the first
        ends = [done[stage][layer] for layer in sorted(done[stage], reverse=True)]
        known = len(ends) > 1 and all(np.diff(ends) > 0)
        out.append(np.diff([0.0, *ends[:-1], 1.0])[::-1] if known else np.ones(1))
    counts = {len(p) for p in out if len(p) > 1}
    if len(counts) == 1:
        # stages that tell nothing have as many layers as the others
        (count,) = counts
        out = [p if len(p) > 1 else np.full(count, 1 / count) for p in out]
    elif any(len(p) == 1 for p in out):
        out = [np.ones(1)] * num_stages
    return out


def shares(layers: list[NDArray[np.float64]], num_stages: int) -> NDArray[np.float64]:
    """Return [new, old]: the share of each old stage's time that falls into each new stage when the layers of all
    stages are assigned to the new ones evenly and in order."""
    if num_stages == len(layers):
        return np.eye(num_stages)
    widths = np.concatenate([np.full(len(p), 1.0) for p in layers])
    owner = np.repeat(np.arange(len(layers)), [len(p) for p in layers])
    edges = np.concatenate([[0.0], np.cumsum(widths)]) / widths.sum()
    out = np.zeros((num_stages, len(layers)))
    for j in range(num_stages):
        low, high = j / num_stages, (j + 1) / num_stages
        inside = np.maximum(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0.0) / np.diff(edges)
        np.add.at(out[j], owner, inside * np.concatenate(layers))
    return out
