"""How fast a machine was when it was measured, against how fast it was when its profile was made.

A laptop throttles, and neighbours come and go: tables of a machine are of its pace when it was calibrated. A prediction
from them has the seconds that the reference probe took then, and a run those that it took right after the run, as
``records["pace"]`` of their timelines: columns ``product`` and ``copy`` of a row, with ``made``, when it was
calibrated, or ``share``, that of the run's seconds in which its processors computed.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from meshwright.timeline import Records, Timeline

#: What the reference probe times, in words.
WORK = {"product": "a matrix product", "copy": "a copy"}
#: The share by which a pace may differ without being said: what the probe itself varies by on a quiet machine.
LIMIT = 0.1


class MachinePace(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long as when it was calibrated (``made``) a machine takes for what the reference probe times:
    ``longer`` each, ``slower`` in the mean. ``others`` is the share of that time in which other work had its cores."""

    longer: dict[str, float]
    made: str
    others: float = 0.0

    @property
    def slower(self) -> float:
        return fmean(self.longer.values())

    @property
    def drifted(self) -> bool:
        """Whether the difference is more than the probe's own noise (:data:`LIMIT`)."""
        return abs(self.slower - 1) > LIMIT

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return msgspec.to_builtins(self) | {"slower": self.slower, "drifted": self.drifted}

    def said(self) -> str:
        """Return the drift in words."""
        times = max(self.slower, 1 / self.slower)
        parts = ", ".join(f"{WORK.get(name, name)} {longer:.2f}" for name, longer in self.longer.items())
        which = "slower" if self.slower > 1 else "faster"
        others = f"; other work had its cores for {self.others:.0%} of the time" if self.others > LIMIT else ""
        return (
            f"this machine is now {times:.2f} times {which} than when it was calibrated, {self.made} (times as long as "
            f"then: {parts}{others})"
        )


def record(seconds: dict[str, float]) -> dict[str, Records]:
    """Return the table of a measured timeline that says at which pace it was."""
    return {"pace": {name: np.array([value]) for name, value in seconds.items()}}


def pace(predicted: Timeline, measured: Timeline) -> MachinePace | None:
    """Return the pace at which `measured` was against that of the profile behind `predicted`, None where either does
    not say."""
    then, now = (timeline.records.get("pace", {}) for timeline in (predicted, measured))
    both = [name for name in WORK if name in then and name in now]
    if not both or "made" in now or "made" not in then:
        return None
    longer = {name: float(now[name][0]) / float(then[name][0]) for name in both}
    others = 1 - float(now["share"][0]) if "share" in now else 0.0
    return MachinePace(longer=longer, made=str(then["made"][0]), others=others)


__all__ = ["LIMIT", "MachinePace", "pace", "record"]
