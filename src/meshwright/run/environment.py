"""The environment of a process: a launcher's variables, cores. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

#: Parameters of glibc's ``mallopt``, and what they are set to: free memory at the end of the heap that is kept, and the
#: size from which a block is a mapping of its own (the largest that glibc allows).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 2**31 - 1), (-3, 2**25)

#: The priority of what runs before other work (lower is sooner, others have 0).
PREFERRED = -15


def launched() -> bool:
    """Whether a launcher has started this process as one rank of a job."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first() -> bool:
    """Whether this process speaks for its job: rank 0, or no rank of a launched job at all."""
    return not launched() or os.environ["RANK"] == "0"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def only_cores(count: int) -> Iterator[None]:
    """Have this thread, and the processes that it starts meanwhile, use the first `count` of its cores alone, where
    the system lets it choose."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have the processes that are started meanwhile compute on a thread each, whatever ``OMP_NUM_THREADS`` says: what
    is measured is a core. Threads of ranks that share cores spin at every barrier for one that has none, so that ten
    times the processor's time passes over the same work."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def num_threads() -> int:
    """torch's threads in a rank on a processor: one, as a device ``here`` is one core. What asks for more cores asks
    for more devices; ``OMP_NUM_THREADS`` overrides."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(told)) if told.isdecimal() else 1


def keep_memory() -> None:
    """Have this process, until it ends, keep the memory it frees for its next step, rather than give it back to the
    system and be handed it again page by page, each page cleared; where the C library can be told so (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(*which)


def run_in_batch() -> None:
    """Have this thread, and all that those from here on start, leave a core to whoever runs there until that waits
    (Linux's SCHED_BATCH). The threads of a rank hand work to one another, and so do ranks: one that interrupts its
    fellow as it wakes makes it wait for the rest of a time slice, milliseconds. Does nothing where someone chose a
    policy before, or where there are none."""
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def own_cores(local_rank: int, local_size: int) -> None:
    """Keep this process to its share of the cores, where there is a core for every thread of so many processes:
    threads that wake elsewhere find cold caches, and others in their place. Does nothing where cores are too few."""
    with contextlib.suppress(OSError, AttributeError):
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // local_size
        if each >= num_threads():
            os.sched_setaffinity(0, cores[local_rank * each : (local_rank + 1) * each])


def prefer(pid: int | None = None, *, at_once: bool = False) -> None:
    """Let a process (this one if left out), all the threads it has and all that those start run before other work of
    this machine, as far as it is allowed: for times that other programs must not change. `at_once`: it mostly sleeps,
    and runs the moment it wakes."""
    pid = os.getpid() if pid is None else pid
    tasks = Path(f"/proc/{pid}/task")
    # Linux knows no priority of a process, only those of its threads
    for thread in [int(t.name) for t in tasks.iterdir()] if tasks.is_dir() else [pid]:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, PREFERRED)
        if at_once:
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
