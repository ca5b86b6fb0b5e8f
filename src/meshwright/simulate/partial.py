"""Costs of serving iterations on a part of a device, from those on the whole one.

Tables know whole devices. The roofline prices the same kernels on both, and what it says one takes over the other is
what a table's time is multiplied with, at every node.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.cost.part import DevicePart, arithmetic, part_of
from meshwright.lower.forward import Forward
from meshwright.simulate.iterations import IterationCosts, priced
from meshwright.spec.hardware import Device

_TABLES = ("linear_s", "sampled_s", "decode_s", "prefill_s")


class PartialCosts:
    """Prices of the iterations of a replica on parts of its devices, each found once.

    `like` has the sizes of the tables; `context` is the longest request in tokens. `costs` know no tables of whole
    devices."""

    def __init__(self, forward: Forward, device: Device, costs: Costs, like: IterationCosts, context: int):
        self.forward, self.device, self.costs, self.context = forward, device, costs, context
        self.sizes = {"tokens": like.most_tokens, "batch": len(like.decode_s) - 1}
        self._known: dict[DevicePart, IterationCosts] = {}
        self._arithmetic: IterationCosts | None = None

    def roofline(self, part: DevicePart) -> IterationCosts:
        """Return the roofline's times on a part."""
        found = self._known.get(part)
        if found is None:
            device = part_of(self.device, part)
            sizes = {**self.sizes, "context": self.context, "split": False}
            found = self._known[part] = priced(self.forward, device, self.costs, **sizes)
        return found

    def arithmetic(self) -> IterationCosts:
        """Return the times of the matrix operations alone."""
        if self._arithmetic is None:
            sizes = {**self.sizes, "context": self.context, "split": False}
            self._arithmetic = priced(self.forward, self.device, arithmetic(), **sizes)
        return self._arithmetic

    def on(self, table: IterationCosts, part: DevicePart) -> IterationCosts:
        """Return the costs of a table as they are on a part."""
        if part == DevicePart():
            return table
        here, whole = self.roofline(part), self.roofline(DevicePart())
        return msgspec.structs.replace(
            table,
            **{name: getattr(table, name) * _ratio(getattr(here, name), getattr(whole, name)) for name in _TABLES},
        )


def _ratio(here: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Seconds over seconds, 1 where neither takes any."""
    return np.divide(here, whole, out=np.ones_like(whole), where=whole > 0)
