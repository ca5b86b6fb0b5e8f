"""The answer of a step that is fed: with its data, what waits for what, and how many workers are enough."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from meshwright.simulate.feed import FeedSizes, fed
from meshwright.simulate.reservoir import StreamedSteps

#: A share of the time that steps may wait where workers are said to be enough.
ENOUGH = 0.01
#: Own steps, as multiples of the predicted one, at which the step with its data is simulated for an interval.
PLACES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)


class TriedWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """A number of workers beside each rank that reads: the step with its data and the share of it that waits."""

    workers: int
    step_s: float
    waits: float


class FeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A step with its data. ``own_s`` is what it takes by itself, ``step_s`` from step to step, of which ``wait_s`` is
    waited for data (and for cores that workers have) and ``copy_s`` copies it to the device; ``first_s`` is when the
    first step begins, ``early_s`` what the first steps waited each. ``readers`` ranks read, so many ``a_node``.
    ``make_s`` is how long one worker makes a batch by itself, ``stages`` the seconds of it by stage. ``used`` is the
    share of each resource while steps do not wait, ``enough`` the fewest workers a reader with which they wait at most
    :data:`ENOUGH` of the time, None where a resource is full before; ``tried`` are other numbers of workers.
    ``stream``: the steps of a reservoir.
    """

    words: str
    workers: int
    ahead: int
    readers: int
    a_node: int
    own_s: float
    step_s: float
    wait_s: float
    copy_s: float
    first_s: float
    early_s: tuple[float, ...]
    make_s: float
    stages: dict[str, float]
    used: dict[str, float]
    enough: int | None
    tried: tuple[TriedWorkers, ...]
    sizes: FeedSizes
    stream: StreamedSteps | None = None

    @property
    def waits(self) -> float:
        """The share of a step that waits for data."""
        return self.wait_s / self.step_s

    @property
    def full(self) -> tuple[str, ...]:
        """Resources that are full before steps stop waiting, the fullest first."""
        over = [(share, name) for name, share in self.used.items() if share > 1]
        return tuple(name for _, name in sorted(over, reverse=True))

    @property
    def bound(self) -> str:
        """The thing that steps go at the pace of: ``step``, ``workers`` or a full resource."""
        if self.waits <= ENOUGH:
            return "step"
        return self.full[0] if self.full else "workers"

    def steps_of(self, own_s: np.ndarray) -> np.ndarray:
        """Return the steps with their data of steps that take so many seconds by themselves [n]: those in between are
        on a line; a reservoir is there for steps of any length."""
        if self.stream is not None:
            return own_s + self.step_s - self.own_s
        places = np.array(PLACES) * self.own_s
        found = np.array([self.step_s if one == 1.0 else fed(self.sizes.with_step(one * self.own_s)).period_s
                          for one in PLACES])  # fmt: skip
        inside = np.interp(own_s, places, found)
        return np.where(own_s > places[-1], found[-1] + own_s - places[-1], inside)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        told = (name for name in self.__struct_fields__ if name not in ("sizes", "stream"))
        plain = {name: msgspec.to_builtins(getattr(self, name)) for name in told}
        plain["stream"] = None if self.stream is None else self.stream._asdict()
        return plain | {"waits": self.waits, "bound": self.bound, "full": list(self.full)}
