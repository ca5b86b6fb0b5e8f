"""One clock for all processes, after dPRO (Hu et al., 2022, arXiv 2205.02473, section 4.1).

Every rank measures how far its clock is from that of rank 0 by messages there and back, as NTP does: of many rounds the
one with the shortest way says most, and half its length is the most the offset can be wrong. Two such measurements,
before and after the recorded steps, give the drift between them. What was recorded then corrects the rest: a message
cannot arrive before it was sent, nor a collective end on one rank before another had begun it.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

#: Rounds of a measurement: the shortest of this many is rarely disturbed.
ROUNDS = 24


class Probe(msgspec.Struct, frozen=True):
    """At ``at_ns`` of this clock, rank 0's showed ``at_ns + offset_ns``, give or take ``error_ns``."""

    at_ns: int
    offset_ns: float
    error_ns: float


class RankClock(msgspec.Struct, frozen=True):
    """A rank's clock as a line: rank 0's time is ``t + offset_ns + drift * (t - at_ns)``, within ``error_ns``."""

    at_ns: int = 0
    offset_ns: float = 0.0
    drift: float = 0.0
    error_ns: float = 0.0

    def to_reference(self, t_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds of this clock on that of rank 0."""
        return t_ns + self.offset_ns + self.drift * (t_ns - self.at_ns)

    def moved(self, by_ns: float) -> RankClock:
        return msgspec.structs.replace(self, offset_ns=self.offset_ns + by_ns)


def identity() -> str:
    """Names the clock this process reads: processes of one machine read the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def probe(group: dist.ProcessGroup | None = None, *, rounds: int = ROUNDS, now=time.perf_counter_ns) -> Probe:
    """How far this rank's clock is from rank 0's. Every rank of the group must call this; a rank's turn takes about
    `rounds` round trips. `now` is the clock, in nanoseconds."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Probe(now(), 0.0, 0.0)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    if rank == 0:
        for peer in range(1, size):
            for _ in range(rounds):
                dist.recv(torch.empty(1, dtype=torch.int64, device=device), group=group, group_src=peer)
                arrived = _at(now, device)
                times = torch.tensor([arrived, _at(now, device)], dtype=torch.int64, device=device)
                dist.send(times, group=group, group_dst=peer)
        return Probe(now(), 0.0, 0.0)
    samples = np.empty((rounds, 4), np.int64)
    message, answer = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 2))
    for i in range(rounds):
        samples[i, 0] = _at(now, device)
        dist.send(message, group=group, group_dst=0)
        dist.recv(answer, group=group, group_src=0)
        samples[i, 3] = _at(now, device)
        samples[i, 1:3] = answer.tolist()
    return best(samples)


def _at(now, device: torch.device) -> int:
    """The time when what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return now()


def best(samples: NDArray[np.int64]) -> Probe:
    """Return the offset of two clocks in ns from the round that spent the least time on the way (Mills, 1991).

    `samples` are the rounds [n, 4]: (sent here, arrived there, answered there, arrived here)."""
    sent, there, answered, back = samples.T
    way = (back - sent) - (answered - there)
    i = int(np.argmin(way))
    offset = ((there[i] - sent[i]) + (answered[i] - back[i])) / 2
    return Probe(int(sent[i] + back[i]) // 2, float(offset), float(way[i]) / 2)


def line(before: Probe, after: Probe) -> RankClock:
    """The clock through two measurements. The drift is only believed where it exceeds what both may be wrong."""
    between, error = after.at_ns - before.at_ns, max(before.error_ns, after.error_ns)
    change = after.offset_ns - before.offset_ns
    if between <= 0 or abs(change) <= before.error_ns + after.error_ns:
        nearer = min(before, after, key=lambda p: p.error_ns)
        return RankClock(nearer.at_ns, nearer.offset_ns, 0.0, error + abs(change))
    return RankClock(before.at_ns, before.offset_ns, change / between, error)


class Order:
    """The recorded order of events on different ranks: ``slack_ns[i, j]`` is the least time by which an end on rank j
    followed the start on rank i that it needs, on the clocks as they were said to be; negative where they must be
    wrong."""

    def __init__(self, num_ranks: int):
        self.slack_ns = np.full((num_ranks, num_ranks), np.inf)

    def before(self, ranks: NDArray, starts_ns: NDArray, ends_ns: NDArray) -> None:
        """Every end of a collective's members follows every start: ``ranks``, ``starts_ns``, ``ends_ns`` [k]."""
        at = np.ix_(ranks, ranks)
        self.slack_ns[at] = np.minimum(self.slack_ns[at], ends_ns[None, :] - starts_ns[:, None])

    def message(self, source: int, target: int, start_ns: float, end_ns: float) -> None:
        self.slack_ns[source, target] = min(self.slack_ns[source, target], end_ns - start_ns)

    def corrections(self, errors_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the corrections in ns [ranks] to add to the clocks so that every end follows its start: 0 where no
        order is violated, else as little as it takes, and always 0 for rank 0.

        `errors_ns` [ranks] is the uncertainty of each clock; where the order cannot be had within it, the order wins,
        and where the order contradicts itself it is loosened."""
        n = len(errors_ns)
        bounds = self.slack_ns.copy()  # correction_i - correction_j <= bounds[i, j]
        np.fill_diagonal(bounds, 0.0)
        tight = bounds.copy()
        tight[:, 0] = np.minimum(tight[:, 0], np.maximum(errors_ns, 0.0))
        tight[0, :] = np.minimum(tight[0, :], np.maximum(errors_ns, 0.0))
        closed = _closure(tight)
        if (np.diag(closed) < 0).any():
            closed = _closure(bounds)
        while (np.diag(closed) < 0).any():
            bounds = bounds + max(1.0, -float(np.diag(closed).min()))
            np.fill_diagonal(bounds, 0.0)
            closed = _closure(bounds)
        out, settled = np.zeros(n), [0]
        for i in range(1, n):
            high = float(min(out[j] + closed[i, j] for j in settled))
            low = float(max(out[j] - closed[j, i] for j in settled))
            out[i] = min(max(0.0, low), high)
            settled.append(i)
        return out


def _closure(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tightest bound between any two that follows from all (Floyd, 1962; Warshall, 1962)."""
    out = bounds.copy()
    for k in range(len(out)):
        np.minimum(out, out[:, k, None] + out[None, k, :], out=out)
    return out
