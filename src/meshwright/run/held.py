"""The memory that a process holds, and the name of its device."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.run.record import ResidentBytes


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this process held: of a GPU what torch reserved there and what lies beside it (context,
    libraries, communicators, and what others hold), else resident."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.max_memory_reserved(device) + total - free - torch.cuda.memory_reserved(device)
    status = Path("/proc/self/status")
    if status.exists():
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), "")
        if peak:
            return int(peak.split()[1]) * 1024
    return ResidentBytes()()


def device_name(device: torch.device) -> str:
    """Return the name of a device: that of a GPU, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
