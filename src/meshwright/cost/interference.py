"""Interference: how much longer a kernel takes while a collective runs beside it.

They share two things. A collective's kernel occupies multiprocessors, which products and attention lack; and it reads
and writes device memory as fast as its link goes, which norms and activations lack. Processors' cores share time
instead (``simulate/cores.py``). On four GPUs of four kinds computation was seen to be 18.9% slower in the mean and 40%
at most while collectives ran (Lee et al., 2025, arXiv 2507.03114, abstract); here it is 15% for products on an H100 and
up to 50% for kernels that wait for memory beside an all-reduce over NVLink.
"""

from __future__ import annotations

from meshwright.cost.roofline import contention
from meshwright.spec.hardware import Device
from meshwright.work import Collective

#: Times that a byte which a rank sends crosses its device memory: it is read there, one that arrives is written, and a
#: sum reads its own part too (the ring's steps recvReduceSend and recvCopySend of NCCL, src/device/primitives).
SUMMED, COPIED = 3.0, 2.0
#: Share of the memory's bandwidth that a collective takes at most: its own reads and writes wait for others' too.
MOST = 0.5
#: Classes of kernels that wait for memory.
MEMORY_BOUND = ("elementwise", "optimizer")


def slowdown(cause: str, work: Collective, seconds: float, device: Device) -> float:
    """Return the share by which a kernel of a class (``cause``) takes longer beside a collective of so many seconds."""
    if device.cores or seconds <= 0.0:
        return 0.0
    if cause not in MEMORY_BOUND or device.comm_slowdown is not None:
        return contention(device)
    taken = memory_share(work, seconds, device)
    return taken / (1.0 - taken)


def memory_share(work: Collective, seconds: float, device: Device) -> float:
    """Return the share of the device memory's bandwidth that a collective of so many seconds takes."""
    passes = SUMMED if work.op in ("all_reduce", "reduce_scatter") else COPIED
    return min(MOST, passes * sent_bytes(work) / seconds / (device.memory_gb_s * 1e9))


def sent_bytes(work: Collective) -> float:
    """Return the bytes that one rank sends in a collective at least."""
    if work.op in ("send", "relay"):
        return work.num_bytes
    others = (work.group.size - 1) / work.group.size
    return work.num_bytes * others * (2.0 if work.op == "all_reduce" else 1.0)
