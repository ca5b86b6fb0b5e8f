"""The pace of a machine: what a matrix product and a copy take on some cores or GPUs at once, timed in half a second.

A calibration keeps it beside its tables, from all cores, as its tables are. A run that was predicted with them takes it
again with as many processes as it had: what throttles or shares their cores shows in both alike
(:mod:`meshwright.compare.pace`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from meshwright.run.bench.clock import BenchClock
from meshwright.run.environment import launched, num_cores, one_thread
from meshwright.run.launch import start
from meshwright.run.world import World

#: Rows of the square product, and bytes that are copied: on a GPU as much as keeps all of it busy.
SIZES = {"cpu": (256, 16 << 20), "cuda": (4096, 256 << 20)}
#: Repeats of either in turn, of which the median counts, and the seconds that each lasts.
REPEATS, SPAN_S = 9, 20e-3
#: Processes that are timed at once, at most.
MOST_RANKS = 8


def num_timed(kind: str) -> int:
    """Return the cores or GPUs that are timed at once on a ``cpu`` or ``cuda`` device."""
    return min(torch.cuda.device_count() if kind == "cuda" else num_cores(), MOST_RANKS)


def paces(world: World) -> dict[str, tuple[float, float]]:
    """Time a ``product`` and a ``copy`` on all processes of a job at once: the seconds that pass, and those of the
    processor (on a GPU the same), each the median of the repeats, in the mean over the processes."""
    clock, device = BenchClock(world), world.device
    width, size = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right, result = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(3))
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    runs: dict[str, Callable[[], object]] = {
        "product": partial(torch.mm, left, right, out=result),
        "copy": partial(target.copy_, source),
    }
    counts = {name: _count(clock, run) for name, run in runs.items()}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            timed[name].append(clock.both(run, counts[name]))
    found = torch.tensor(
        [[median(seconds) for seconds in zip(*each, strict=True)] for each in timed.values()], device=device
    )
    if device.type == "cuda":
        found[:, 1] = found[:, 0]
    if world.size > 1:
        dist.all_reduce(found)
    each = (found / world.size).tolist()
    return {name: (passed, busy) for name, (passed, busy) in zip(runs, each, strict=True)}


def _count(clock: BenchClock, run: Callable[[], object]) -> int:
    """Return how many calls fill a span, once the device is awake."""
    clock.once(run, 2)
    return max(1, int(SPAN_S / clock.once(run, 2)))


def now(kind: str, num_ranks: int) -> dict[str, float] | None:
    """Return the seconds that a ``product`` and a ``copy`` take now on so many processes, a core or GPU for each at
    most, as other work leaves them to it, and the ``share`` of these seconds in which their processors computed; None
    under a launcher, whose processes cannot start others."""
    if launched():
        return None
    with one_thread():
        return start(_now, num_ranks=min(num_ranks, num_timed(kind)), device=kind)


def _now(world: World) -> dict[str, float]:
    found = paces(world)
    passed, busy = (sum(one) for one in zip(*found.values(), strict=True))
    return {name: seconds for name, (seconds, _) in found.items()} | {"share": busy / passed}


__all__ = ["now", "num_timed", "paces"]
