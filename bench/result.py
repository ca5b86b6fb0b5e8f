"""A benchmark's result, and how it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark: ``value`` in ``unit``, its ``target`` (``at_least`` or at most that), and the plain
    ``reference`` in the same unit where there is one."""

    what: str
    value: float
    unit: str
    target: float
    at_least: bool = False
    reference: float | None = None

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.target:,.4g} {self.unit}"

    @property
    def ratio(self) -> float | None:
        """How many times faster than the reference."""
        if self.reference is None:
            return None
        return self.value / self.reference if self.at_least else self.reference / self.value


def best(run: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of several runs, after one that is not counted."""
    run()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def once(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
