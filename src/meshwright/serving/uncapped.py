"""Clocks as they are until the row draws more than it may: ``power=uncapped``, beside which other policies stand."""

from __future__ import annotations

import msgspec

from meshwright.serving.polca import Polca

POLICY = msgspec.structs.replace(
    Polca(),
    name="uncapped",
    title="full clocks until a row draws more than it may",
    first=float("inf"),
    second=float("inf"),
)
