"""Power of a row of servers: what a decider is told of it, and what it decides."""

from __future__ import annotations

import msgspec


class PowerSeen(msgspec.Struct, frozen=True, tag=True):
    """The mean power of the row since the last time, as a share of what it may draw."""

    drawn: float


class Cap(msgspec.Struct, frozen=True, tag=True):
    """The clocks from now on, as shares of the full one: of servers of ``low`` priority and of the others."""

    low: float
    high: float


#: Nobody's clock is capped.
FREE = Cap(1.0, 1.0)
