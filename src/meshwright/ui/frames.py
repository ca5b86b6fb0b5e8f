"""Frames between the server and its workers: four bytes of length, then JSON."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

FRAME = struct.Struct(">I")
#: Said to a worker that gets one long request only: it does not warm up.
COLD = "cold"


def pack(value: dict[str, Any]) -> bytes:
    """A value as one frame; infinities and NaN become null, as JSON knows neither."""
    data = msgspec.json.encode(value)
    return FRAME.pack(len(data)) + data
