"""Rates of the drives that state is kept on, through the very file that a run keeps it in."""

from __future__ import annotations

import shutil
import time
from collections import deque

import msgspec

from meshwright.run.drives import Drives

#: Bytes of a request, those of a layer's state in a small model, and of all requests that are timed.
REQUEST, TOTAL = 16 << 20, 512 << 20


class DriveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of sequential requests, one after the other in each direction, in 1e9 bytes/s, and the bytes that are
    free."""

    read_gb_s: float
    write_gb_s: float
    free_bytes: int


def figures(folder: str = "", *, request: int = REQUEST, total: int = TOTAL) -> DriveFigures:
    """Measure the drives under `folder` ("": the system's for temporary files)."""
    drives = Drives(folder)
    slots = [drives.slot(request) for _ in range(max(2, total // request))]
    buffers = [drives.buffer(request) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        buffer.values.fill_(number + 1)  # a page that was never written is none, and zeros may be stored as none
    rates = []
    for begin in (drives.write, drives.read):
        under_way: deque = deque()
        begun = time.perf_counter()
        for number, slot in enumerate(slots):
            if len(under_way) == len(buffers):
                under_way.popleft().result()
            under_way.append(begin(slot, buffers[number % len(buffers)]))
        for future in under_way:
            future.result()
        rates.append(len(slots) * request / (time.perf_counter() - begun) / 1e9)
    free = shutil.disk_usage(drives.folder).free
    drives.close()
    return DriveFigures(read_gb_s=rates[1], write_gb_s=rates[0], free_bytes=free)
