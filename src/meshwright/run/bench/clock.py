"""Clocks of the micro-benchmarks on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import torch

from meshwright.run.world import World, meet

REPEATS = 5
#: Seconds that one repeat of a short operation lasts if nothing else is said (see :class:`.scope.Scope`).
SPAN_S = 25e-3
#: Kernels that are issued ahead of a GPU, at least so many seconds each; its queue holds some more.
MOST_QUEUED, ISSUE_S = 512, 4e-6
#: Measurements of a repeat on a GPU, of which the shortest counts: where the host falls behind, the device waits.
TRIES = 2
#: Rows of the square product that keeps a GPU busy meanwhile.
HOLD_WIDTH = 4096


class TimedRepeats(msgspec.Struct, frozen=True):
    """Mean seconds of the repeats, their interquartile range over the median and, of a collective, the seconds that a
    rank's processor was busy with it."""

    seconds: float
    spread: float
    busy: float = 0.0


class Bench(NamedTuple):
    """``make`` lays out operands and gives what to time; its seconds are multiplied by ``scale``."""

    make: Callable[[], Callable[[], object]]
    scale: float = 1.0


class BenchClock:
    """Times functions on all processes of a job at once."""

    def __init__(self, world: World, span_s: float = SPAN_S):
        self.world, self.device, self.span_s = world, world.device, span_s
        self._holding: tuple[torch.Tensor, torch.Tensor] | None = None
        self._held_s = 0.0
        self.now = time.perf_counter if self.device.type == "cuda" else time.process_time

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self) -> None:
        """All processes go on from here at about the same time."""
        self.sync()
        if self.world.size > 1:
            meet()

    def once(self, run: Callable[[], object], count: int) -> float:
        self.sync()
        begun = self.now()
        for _ in range(count):
            run()
        self.sync()
        return (self.now() - begun) / count

    def both(self, run: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds of a call: those that pass, and those of this process's processor time."""
        self.together()
        begun, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            run()
        self.sync()
        return (time.perf_counter() - begun) / count, (time.process_time() - busy) / count

    def time(self, run: Callable[[], object]) -> TimedRepeats:
        """Mean over the repeats of as many calls each as fill a span."""
        self.together()
        return mean([self._span(run) for _ in range(REPEATS)])

    def repeat(self, bench: Bench) -> float:
        """Seconds of a benchmark, once."""
        run = bench.make()
        self.together()
        return self._span(run) * bench.scale

    def _span(self, run: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            return min(self._queued(run) for _ in range(TRIES))
        one = self.once(run, 1)
        if one < self.span_s / 4:  # most of a short first call may be warming up
            one = self.once(run, 1)
        return self.once(run, max(1, int(self.span_s / max(one, 1e-7))))

    def _queued(self, run: Callable[[], object]) -> float:
        """Seconds of the device for a call: the calls wait behind other work until all are issued."""
        self.once(run, 1)
        self.sync()
        begun = self.now()
        run()
        issued = self.now() - begun
        self.sync()
        whole = self.now() - begun
        # a kernel takes the host some 5 us or more, and a queue holds about a thousand
        count = max(1, min(int(self.span_s / whole), int(MOST_QUEUED * ISSUE_S / issued)))
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._hold(2.0 * count * issued)
        first.record()
        for _ in range(count):
            run()
        last.record()
        self.sync()
        return first.elapsed_time(last) * 1e-3 / count

    def _hold(self, seconds: float) -> None:
        """Give the device work for so many seconds, and go on at once."""
        if self._holding is None:
            matrix = torch.randn(HOLD_WIDTH, HOLD_WIDTH, device=self.device, dtype=torch.bfloat16)
            self._holding, self._held_s = (matrix, torch.empty_like(matrix)), 0.0
            self.once(self._product, 10)  # the first calls find the kernel
            self._held_s = self.once(self._product, 10)
        for _ in range(max(1, min(MOST_QUEUED, math.ceil(seconds / self._held_s)))):
            self._product()

    def _product(self) -> None:
        matrix, result = self._holding
        torch.mm(matrix, matrix, out=result)


def mean(seconds: Iterable[float]) -> TimedRepeats:
    """Of the repeats, without the slowest and the quickest fifth (of three and four: without the slowest and the
    quickest): what a machine does once in a while is no part of an operation, and what is left lies around the
    median."""
    ordered = sorted(seconds)
    beyond = max(1, len(ordered) // 5) if len(ordered) > 2 else 0
    kept = ordered[beyond : len(ordered) - beyond]
    spread = ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]
    return TimedRepeats(sum(kept) / len(kept), spread / ordered[len(ordered) // 2])
