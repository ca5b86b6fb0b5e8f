"""The power of a device by what it does: idle, multiplying, or waiting for memory.

Between the power of an idle device and its rated power lies what its work draws: all of it while the matrix units
multiply, a part of it (:data:`MEMORY_SHARE`) while kernels wait for memory, and in proportion where they do so for a
part of the time. An operation takes the same energy at every clock: the switching power of a circuit is C V^2 f
(Chandrakasan, Sheng and Brodersen, 1992), and the voltage of a capped clock is not published, so that none is taken to
be saved by a lower one. A cap then saves as much power as it costs speed of what multiplies, at least.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.hardware import Device

#: Share of the power between idle and rated that a kernel draws which waits for memory, and what it lies between: next
#: tokens take 137 to 300 W on an H200 (700 W, 75 W idle), four kinds of attention (2605.11999, abstract), the middle.
MEMORY_SHARE, MEMORY_SHARES = 0.23, (0.10, 0.36)
#: Idle power over rated power where a device's idle power is not known: the middle of the catalog's, 0.10 to 0.16.
IDLE_SHARE = 0.13


class Draw(NamedTuple):
    """The power of one device in watts: ``idle`` and ``rated``, and the share of what is between them that a kernel
    draws which waits for memory. ``assumed``: the idle power is not known of it."""

    idle: float
    rated: float
    memory: float = MEMORY_SHARE
    assumed: bool = False

    def watts(self, operations: float, traffic: float) -> float:
        """Return the mean power of a time in these shares of which its operations and its memory's traffic alone would
        keep the device busy."""
        return self.idle + (self.rated - self.idle) * min(1.0, operations + self.memory * traffic)


def draw(device: Device, memory: float = MEMORY_SHARE) -> Draw | None:
    """Return the power of a device; None where its rated power is not known."""
    if device.tdp_w is None:
        return None
    known = device.idle_w is not None
    return Draw(device.idle_w if known else IDLE_SHARE * device.tdp_w, device.tdp_w, memory, not known)
