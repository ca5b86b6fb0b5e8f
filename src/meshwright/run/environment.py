"""What a process finds around it: a launcher's variables, cores. Needs no torch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether a launcher has started this process as one rank of a job."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first() -> bool:
    """Whether this process speaks for its job: rank 0, or no rank of a launched job at all."""
    return not launched() or os.environ["RANK"] == "0"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(local_size: int) -> int:
    """torch's threads in each of the processes of a machine, so that together they have its cores."""
    return max(1, num_cores() // local_size)
