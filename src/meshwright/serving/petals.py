"""Chains of peers: the decider of which layers a peer holds, through which peers a client's tokens go, and what comes
in the place of a peer that is lost.

Petals (Borzunov et al. 2022, 2209.01188; 2023, 2312.08361) serves a model from peers of unequal speed, each with a run
of its layers. A peer that joins takes the run of layers that is served worst (:func:`spans`). A client finds the chain
of least latency, or the one whose slowest peer has most to spare (:func:`found`), and keeps a copy of all that it sent
to each of its peers: where one is lost, others take its layers (:func:`mended`), get these inputs again, and have the
same keys and values then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from meshwright.errors import MeshwrightError


class Peer(NamedTuple):
    """A peer: the layers that it holds from ``first`` on, before ``end``, and the seconds of one of them (``layer_s``)
    for a token."""

    first: int
    end: int
    layer_s: float


class ChainLink(NamedTuple):
    """A part of a chain: a ``peer`` computes the layers from ``first`` on, before ``end``."""

    peer: int
    first: int
    end: int


def spans(sizes: Sequence[int], rates: Sequence[float], layers: int) -> tuple[tuple[int, int], ...]:
    """Return the (first, end) layers of peers that join one after the other, each with room for so many and so fast:
    each takes the run whose layers are served worst, the least of them first, then the next to least, and so on."""
    served, found = [0.0] * layers, []
    for size, rate in zip(sizes, rates, strict=True):
        size = min(size, layers)
        first = min(range(layers - size + 1), key=lambda at: (sorted(served[at : at + size]), at)) if size else 0
        found.append((first, first + size))
        for layer in range(first, first + size):
            served[layer] += rate
    return tuple(found)


def found(
    peers: Sequence[Peer],
    wait_s: Callable[[int], float],
    hop_s: Callable[[int, int], float],
    *,
    first: int,
    end: int,
    find: str = "latency",
    source: int = -1,
    target: int = -1,
    gone: Collection[int] = (),
) -> tuple[ChainLink, ...]:
    """Return the chain for the layers from `first` on, before `end`; nothing where some of them are nobody's.

    `wait_s` are the seconds that a peer is busy before it computes, `hop_s` those between two peers (-1: the client);
    the chain begins at `source` and goes on to `target`. By latency the sum of all seconds is least; by throughput the
    longest seconds of a peer are, with what waits there."""
    here = [number for number, peer in enumerate(peers) if number not in gone and peer.end > peer.first]
    edges = sorted({first, end, *(edge for n in here for edge in (peers[n].first, peers[n].end) if first < edge < end)})
    begin = (0.0, 0.0) if find == "throughput" else (0.0,)
    best: dict[tuple[int, int], tuple[float, ...]] = {(first, source): begin}
    came: dict[tuple[int, int], tuple[int, int]] = {}
    heap = [(begin, first, source)]
    over: set[tuple[int, int]] = set()
    goal = (end, target)
    while heap:
        cost, at, before = heapq.heappop(heap)
        if (at, before) in over:
            continue
        over.add((at, before))
        if (at, before) == goal:
            break
        if at == end:
            _reach((end, target), (at, before), _sum(cost, 0.0, hop_s(before, target), find), best, came, heap)
            continue
        for number in here:
            peer = peers[number]
            if number == before or not peer.first <= at < peer.end:
                continue
            for edge in edges:
                if at < edge <= peer.end:
                    spent = wait_s(number) + (edge - at) * peer.layer_s
                    more = _sum(cost, spent, hop_s(before, number), find)
                    _reach((edge, number), (at, before), more, best, came, heap)
    if goal not in over:
        return ()
    links, now = [], came[goal]
    while now[1] != source or now[0] != first:
        last = came[now]
        links.append(ChainLink(now[1], last[0], now[0]))
        now = last
    return tuple(reversed(links))


def _sum(cost: tuple[float, ...], spent: float, hop: float, find: str) -> tuple[float, ...]:
    if find == "throughput":
        return max(cost[0], spent), cost[1] + spent + hop
    return (cost[0] + spent + hop,)


def _reach(node, before, cost, best, came, heap) -> None:
    if node not in best or cost < best[node]:
        best[node], came[node] = cost, before
        heapq.heappush(heap, (cost, *node))


def mended(
    chain: Sequence[ChainLink],
    peers: Sequence[Peer],
    wait_s: Callable[[int], float],
    hop_s: Callable[[int, int], float],
    *,
    gone: Collection[int],
    find: str = "latency",
) -> tuple[ChainLink, ...]:
    """Return a chain in which others have the layers of peers that are `gone`; the other links stay as they are, with
    their keys and values.

    Raises:
        MeshwrightError: W012 where nobody else holds some of these layers.
    """
    made: list[ChainLink] = []
    for place, link in enumerate(chain):
        if link.peer not in gone:
            made.append(link)
            continue
        source = made[-1].peer if made else -1
        after = next((one.peer for one in chain[place + 1 :] if one.peer not in gone), -1)
        ends = {"source": source, "target": after}
        other = found(peers, wait_s, hop_s, first=link.first, end=link.end, find=find, gone=gone, **ends)
        if not other:
            raise no_peer(link.first, link.end)
        made += other
    return tuple(made)


def no_peer(first: int, end: int) -> MeshwrightError:
    """Return W012: nobody holds some layers."""
    message = f"no peer holds all of the layers {first} to {end - 1}"
    help = "more peers (dp), or more layers of each (layers=)"
    return MeshwrightError.one("W012", message, place="--serve peers", help=help)
