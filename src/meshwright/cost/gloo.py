"""Collectives of gloo over TCP: torch's on processors, whose steps wait for one another.

gloo sends a message once the receiver has said that it is ready for it, so that one which nobody waited for takes two
ways: the word that comes, and the message. Its all-reduce and all-gather are rings in segments of at most 1 MiB, at
least two of a rank's share: while one is on its way the one before is added, and the next but one is asked for when
that is done. On a long way (a segment takes less than the word and the answer) a ring is therefore as slow as two ways
for every pair of segments, however little is sent; on a short one the link is full. Both are read off the same
recurrence here, message by message, from two physical quantities of the link: the latency of a message one way and its
bytes a second (github.com/facebookincubator/gloo: allreduce.cc, allgather.cc, transport/tcp/pair.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from meshwright.cost.chain import Estimate
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Work

#: Bytes of a segment at most, and segments of a rank's share at least; bytes of a value that is summed.
SEGMENT_BYTES, LEAST_SEGMENTS, VALUE_BYTES = 2**20, 2, 4
#: Collectives of one group that torch has gloo work on at once: its threads.
AT_ONCE = 2


class GlooLink(NamedTuple):
    """A link as messages see it: a message of b bytes that is waited for takes ``latency_s + b / bytes_s``; ``sigma``
    is the relative spread of single ones."""

    latency_s: float
    bytes_s: float
    sigma: float = 0.0


def trip(count: int, segment_s: float, latency_s: float) -> float:
    """Seconds of one trip around a ring: `count` segments from every rank to the next, each of `segment_s` on the wire.
    A segment is asked for when the one two before it has come, and two when the trip begins."""
    posted, wire, came = 0.0, 0.0, [0.0, 0.0]
    for _ in range(count):
        posted = max(posted, came[-2])
        wire = max(posted + latency_s, wire) + segment_s
        came.append(wire + latency_s)
    return came[-1]


@lru_cache(maxsize=65536)
def all_reduce(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a sum of `num_bytes` over n ranks: a trip that adds and a trip that gathers."""
    if 1 <= num_bytes <= VALUE_BYTES * LEAST_SEGMENTS:  # a segment or two go round, and all wait for them
        return 2 * (n - 1) * (link.latency_s + num_bytes / link.bytes_s)
    each = max(LEAST_SEGMENTS, ceil(ceil(num_bytes / SEGMENT_BYTES) / n))
    return 2 * trip((n - 1) * each, num_bytes / (n * each) / link.bytes_s, link.latency_s)


@lru_cache(maxsize=65536)
def all_gather(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a gather of `num_bytes` in all: every rank's share goes round in two halves."""
    return trip((n - 1) * LEAST_SEGMENTS, num_bytes / (n * LEAST_SEGMENTS) / link.bytes_s, link.latency_s)


def exchange(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of an all-to-all of `num_bytes` a rank: all messages at once, each asked for first."""
    return 2 * link.latency_s + (n - 1) / n * num_bytes / link.bytes_s


def message(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a message that is waited for when it is sent."""
    return link.latency_s + num_bytes / link.bytes_s


def relay(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a message that each rank waits for and passes on."""
    return (n - 1) * message(n, num_bytes, link)


def hops(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a message of `num_bytes` from every rank to the next, as often as there are others, each asked for
    when the one before it has come."""
    return (n - 1) * (2 * link.latency_s + num_bytes / link.bytes_s)


def broadcast(n: int, num_bytes: float, link: GlooLink) -> float:
    """Seconds of a broadcast down a binomial tree, all of which waits from the start: the root sends to one rank for
    each of its levels."""
    levels = ceil(log2(n))
    return (levels + 1) * link.latency_s + levels * num_bytes / link.bytes_s


#: What torch has gloo do for an operation; its reduce-scatter is an all-reduce of which each keeps a share.
OPERATIONS: dict[str, Callable[[int, float, GlooLink], float]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": all_reduce,
    "all_gather": all_gather,
    "all_to_all": exchange,
    "send": message,
    "relay": relay,
    "hops": hops,
    "broadcast": broadcast,
}


#: Messages of every rank to those that hear it: as many as its group's fan.
NEIGHBOURS = "neighbours"


class GlooNetwork:
    """Prices collectives over levels of a cluster by name; a link of the cost chain. `operations` are those that gloo
    does there. A device that computes is free in all that a collective takes."""

    def __init__(self, levels: Mapping[str, GlooLink], operations: tuple[str, ...] = (*OPERATIONS, NEIGHBOURS)):
        self.levels, self.operations = dict(levels), operations

    def __call__(self, work: Work, device: Device) -> Estimate | None:
        """Seconds of a collective on each of its ranks; None for other work, operations and levels."""
        if not isinstance(work, Collective) or work.op not in self.operations or not work.group.hops:
            return None
        link = self.levels.get(work.group.hops[-1].name)
        if link is None:
            return None
        if work.group.size <= 1 or work.num_bytes <= 0:
            return Estimate(0.0, "network", "gloo", 0.0)
        if work.op == NEIGHBOURS:  # to all at once, each asked for first
            seconds = 2 * link.latency_s + work.group.fan * work.num_bytes / link.bytes_s
        else:
            seconds = OPERATIONS[work.op](work.group.size, work.num_bytes, link)
        return Estimate(seconds, "network", "gloo over a measured link", link.sigma, wait=seconds)
