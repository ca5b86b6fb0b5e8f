"""Recordings of all processes, gathered on rank 0 and joined to one timeline."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from meshwright.plan import Plan
from meshwright.run import clocks
from meshwright.run.assemble import Reading, assemble
from meshwright.run.clocks import Probe, RankClock
from meshwright.run.record import HeldMemory, Label, Recorder, Recording
from meshwright.timeline import UNKNOWN, Identity, Timeline

_COLUMNS = ("label", "step", "start_ns", "end_ns", "depth")


def gather(
    recorder: Recorder, plan: Plan, *, before: Probe | None = None, identity: Identity = UNKNOWN
) -> Timeline | None:
    """The timeline of what all ranks recorded, on rank 0; None on the others. Every rank must call this.

    `before` is :func:`meshwright.run.clocks.probe` from before the recorded steps: with it the clocks' drift is known.
    `identity` says what was run: the names of model, cluster and workload as a prediction has them.
    """
    recording = recorder.recording()
    after = clocks.probe()
    clock = (
        clocks.line(before, after)
        if before is not None
        else RankClock(after.at_ns, after.offset_ns, 0.0, after.error_ns)
    )
    found = _collected(pack(recording, clock, clocks.identity()))
    if found is None:
        return None
    readings = sorted((unpack(data) for data in found), key=lambda r: r.recording.rank)
    return assemble(_one_clock(readings), plan, identity)


def _one_clock(readings: list[Reading]) -> list[Reading]:
    """Processes that read one clock agree exactly; what was measured of them is only the way of the messages."""
    first: dict[str, RankClock] = {}
    out = []
    for reading in readings:
        name = reading.clock_name
        clock = first.setdefault(name, reading.clock) if name else reading.clock
        out.append(msgspec.structs.replace(reading, clock=clock))
    return out


def pack(recording: Recording, clock: RankClock, clock_name: str) -> bytes:
    """A reading as bytes, columns as they lie in memory."""
    columns = {name: getattr(recording, name).tobytes() for name in _COLUMNS}
    said: dict[str, Any] = {
        "rank": recording.rank,
        "host": recording.host,
        "labels": recording.labels,
        "steps": recording.steps,
        "memory": recording.memory,
        "columns": columns,
        "clock": clock,
        "clock_name": clock_name,
    }
    return msgspec.msgpack.encode(said)


class _Packed(msgspec.Struct):
    rank: int
    host: str
    labels: list[Label]
    steps: list[tuple[int, int, int]]
    memory: list[HeldMemory]
    columns: dict[str, bytes]
    clock: RankClock
    clock_name: str


def unpack(data: bytes) -> Reading:
    """The reading that :func:`pack` made bytes of."""
    p = msgspec.msgpack.decode(data, type=_Packed)
    types = {"start_ns": np.int64, "end_ns": np.int64}
    columns = {name: np.frombuffer(p.columns[name], types.get(name, np.int32)) for name in _COLUMNS}
    recording = Recording(
        rank=p.rank, host=p.host, labels=tuple(p.labels), steps=tuple(p.steps), memory=tuple(p.memory), **columns
    )
    return Reading(recording, p.clock, p.clock_name)


def _collected(data: bytes) -> list[bytes] | None:
    """Every rank's bytes on rank 0, None on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [data]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    if dist.get_rank():
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), 0)
        return None
    out = [data]
    for rank in range(1, dist.get_world_size()):
        message = torch.empty(int(sizes[rank]), dtype=torch.uint8, device=device)
        dist.recv(message, rank)
        out.append(message.cpu().numpy().tobytes())
    return out
