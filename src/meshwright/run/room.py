"""Room: the memory of this machine that a run may fill, beside what its plan is predicted to hold."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: Limits of a group of processes, and what it uses of them (cgroup v2, then v1).
GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def host_bytes() -> int | None:
    """Return the bytes of the host's memory that nobody uses, no more than a container may still take; None where the
    system does not say."""
    found = []
    for line in _text("/proc/meminfo").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            found.append(int(size.split()[0]) * 1024)
    for limit, used in GROUPS:
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdecimal() and now.isdecimal():
            found.append(max(0, int(most) - int(now)))
    return min(found, default=None)


def on_gpus(device: str) -> bool:
    """Whether a run on a ``device`` (cpu, cuda, auto or "") has GPUs."""
    return device != "cpu" and torch.cuda.is_available()


def device_bytes(device: str, local_size: int) -> int | None:
    """Return the bytes that a rank on a ``device`` may fill, its share of the host's on a processor; None where nobody
    knows."""
    if on_gpus(device):
        devices = range(torch.cuda.device_count())
        return min((torch.cuda.get_device_properties(i).total_memory for i in devices), default=None)
    free = host_bytes()
    return None if free is None else free // local_size


def local_ranks(num_ranks: int) -> int:
    """Return how many ranks of a job this machine has: all of them, unless a launcher said."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) else num_ranks


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
