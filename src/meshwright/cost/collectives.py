"""Collectives by algorithm over the real tree of levels.

Every algorithm NCCL has for an operation (ring, tree, in-network reduction; protocols LL, LL128 and Simple) is a
line, seconds = start + bytes x rate, by the alpha-beta model (Hockney, 1994; Thakur et al., 2005): steps pay a
level's latency, flows a port's bandwidth. The library picks the fastest, so a collective's price is the lower
envelope of its lines. Over several levels a ring passes every child's port once, so the slowest port sets its
bandwidth; a tree (double binary, Sanders et al., 2009) pays the logarithm of the nodes; switches that add up
(NVLS) halve what crosses each port. The constants are the fabrics' (:mod:`meshwright.cost.fabric`).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2, sqrt

from meshwright.cost.fabric import Constants, shipped, uncontended
from meshwright.cost.host_reduce import host_lines
from meshwright.work import HOST_REDUCE, Collective, Group, Hop

Line = tuple[float, float]
"""(seconds at no bytes, seconds per byte) of one algorithm."""


def collective_seconds(work: Collective) -> float:
    """Seconds of one collective on each of its ranks, on fabrics of which only the kind is known; 0 for a group
    of one."""
    if work.group.size <= 1 or work.num_bytes <= 0:
        return 0.0
    return envelope(_lines_of_kinds(work.op, work.group), work.num_bytes)


@lru_cache(maxsize=65536)
def _lines_of_kinds(op: str, group: Group) -> tuple[Line, ...]:
    return lines(op, group, tuple(shipped().find(hop)[0].constants for hop in group.hops))


def envelope(curve: tuple[Line, ...], num_bytes: float) -> float:
    """Seconds of the fastest line."""
    return min(start + num_bytes * rate for start, rate in curve)


def lines(op: str, group: Group, fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """The algorithms of an operation on a group of two ranks or more; `fabrics` are its hops' constants."""
    if op == HOST_REDUCE:
        return host_lines(group, fabrics)
    return _ALGORITHMS[op](group.size, group.hops, fabrics)


def _port(hop: Hop, fabric: Constants) -> float:
    """Bytes a second a child's port carries while its siblings send too. Where flows collide inside the network is
    measured in general, or worked out for switches that are described."""
    if hop.wired:
        return hop.gb_s * 1e9 / hop.ringed
    return hop.gb_s * 1e9 * uncontended(hop, fabric)


def _ring_steps(hops: tuple[Hop, ...]) -> list[float]:
    """Steps of one trip around a group at each level; together they are its ranks less one. A torus is walked a
    dimension at a time; two dimensions are assumed, the fewest there are."""
    steps, outside = [], 1
    for hop in reversed(hops):
        once = 2 * (sqrt(hop.members) - 1) if hop.topology == "torus" else hop.members - 1
        steps.append(once * outside)
        outside *= hop.members
    return steps[::-1]


def _tree_steps(hops: tuple[Hop, ...]) -> list[float]:
    """Steps from a leaf to the root: a chain inside a node, a binary tree over nodes."""
    return [ceil(log2(h.members)) if h.scale_out else h.members - 1 for h in hops]


def _latency(steps: list[float], hops: tuple[Hop, ...], fabrics: tuple[Constants, ...], protocol: str) -> float:
    of = "step_" + protocol
    return sum(s * h.latency_us * getattr(f, of) for s, h, f in zip(steps, hops, fabrics)) * 1e-6


def _ring(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...], op: str) -> list[Line]:
    """`op` by a ring in each protocol; rounds = 2 for all-reduce (reduce-scatter, then all-gather)."""
    rounds = 2 if op == "all_reduce" else 1
    flow = 1.0 if op == "broadcast" else rounds * (n - 1) / n
    large = "all_gather" if op == "broadcast" else op
    flows = [flow / (_port(h, f) * getattr(f, large)) for h, f in zip(hops, fabrics)]
    steps = [rounds * s for s in _ring_steps(hops)]
    found = _by_protocol(steps, flows, hops, fabrics)
    passing = [0.0 if op == "broadcast" else f.reduce_us if op == "all_reduce" else f.gather_us for f in fabrics]
    if not any(passing):
        return found
    # Measured at scale, where all steps wait for the slowest connection: what the latency of a large message's step
    # between two nodes stood for. Small messages still pay their latencies where those take longer, and all of them
    # those of levels between nodes where nothing was measured.
    passed = rounds * (n - 1) * max(passing) * 1e-6
    for s, h, f, p in zip(steps, hops, fabrics, passing):
        passed += s * h.latency_us * f.step_simple * 1e-6 if h.scale_out and not p else 0.0
    *small, (_, rate) = found
    return [*((max(start, passed), rate) for start, rate in small), (fabrics[0].start_simple_us * 1e-6 + passed, rate)]


def _by_protocol(
    steps: list[float], flows: list[float], hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]
) -> list[Line]:
    """A line for each protocol, of steps through each level and seconds a byte at each level in large messages."""
    latencies = [s * h.latency_us for s, h in zip(steps, hops)]
    start_ll = start_ll128 = start_simple = 0.0
    for latency, fabric in zip(latencies, fabrics):
        start_ll += latency * fabric.step_ll
        start_ll128 += latency * fabric.step_ll128
        start_simple += latency * fabric.step_simple
    first = fabrics[0]
    return [
        ((first.start_ll_us + start_ll) * 1e-6, max(flow / f.ll for flow, f in zip(flows, fabrics))),
        ((first.start_ll128_us + start_ll128) * 1e-6, max(flow / f.ll128 for flow, f in zip(flows, fabrics))),
        ((first.start_simple_us + start_simple) * 1e-6, max(flows)),
    ]


def _gather(op: str):
    """All-gather or reduce-scatter: a ring, and each rank's copy of its own block."""

    def algorithms(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
        own = 1 / n / (_port(hops[0], fabrics[0]) * fabrics[0].own_copy)
        return tuple((start, rate + own) for start, rate in _ring(n, hops, fabrics, op))

    return algorithms


def _all_reduce(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    found = _ring(n, hops, fabrics, "all_reduce")
    most = fabrics[-1].tree_nodes
    if hops[-1].scale_out and most and max(_nodes(hops)) > most:
        return tuple(found)
    if hops[-1].scale_out:
        found += _tree(hops, fabrics)
    if hops[0].reduces and not hops[0].scale_out and all(h.scale_out for h in hops[1:]):
        found.append(_in_network(hops, fabrics))
    return tuple(found)


def _nodes(hops: tuple[Hop, ...]) -> list[int]:
    """Return the number of children of the whole group at each level outside a node."""
    outside, count = [], 1
    for hop in reversed(hops):
        count *= hop.members
        if hop.scale_out:
            outside.append(count)
    return outside[::-1]


def _tree_flow(count: int) -> float:
    """Buffers a node sends in a double binary tree: half up and half down, and twice that but at the roots."""
    return 2 * (count - 1) / count


def _rate(hop: Hop, fabric: Constants) -> float:
    return _port(hop, fabric) * fabric.all_reduce


def _up_and_down(count: int, hop: Hop, fabric: Constants) -> float:
    """Seconds a byte of an all-reduce over `count` nodes at one's port: in a double binary tree, or to switches that
    add up and back."""
    if hop.reduces:
        return 1 / (_port(hop, fabric) * fabric.in_network)
    return _tree_flow(count) / (_rate(hop, fabric) * fabric.tree)


def _tree(hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> list[Line]:
    """A double binary tree over nodes, a chain inside each."""
    nodes = iter(_nodes(hops))
    flows = []
    for hop, fabric in zip(hops, fabrics):
        flows.append(_up_and_down(next(nodes), hop, fabric) if hop.scale_out else 2.0 / _rate(hop, fabric))
    return _by_protocol([2 * s for s in _tree_steps(hops)], flows, hops, fabrics)


def _in_network(hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> Line:
    """Switches add up inside a node, each port carrying the buffer and a rank's share of it; trees over nodes."""
    hop, fabric = hops[0], fabrics[0]
    rate = (1 + 1 / hop.members) / (_port(hop, fabric) * fabric.in_network)
    start = fabric.in_network_start_us * 1e-6
    if len(hops) > 1:
        over = zip(_nodes(hops), *zip(*((h, f) for h, f in zip(hops, fabrics) if h.scale_out)))
        rate = max(rate, *(_up_and_down(count, h, f) for count, h, f in over))
        start += 2 * _latency(_tree_steps(hops)[1:], hops[1:], fabrics[1:], "simple")
    return start, rate


def _distance(hop: Hop) -> float:
    """Links a byte crosses on average where only neighbours are joined: a quarter of a ring, or of each side of a
    torus of two dimensions, going either way."""
    if hop.topology == "ring":
        return max(1.0, hop.members / 4)
    return max(1.0, sqrt(hop.members) / 2) if hop.topology == "torus" else 1.0


def _exchange(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """All-to-all: small messages one connection to a peer at a time; large ones fill every child's port with what
    its members send outside it, all levels at once."""
    small = large = peers = 0.0
    for hop, fabric in zip(hops, fabrics):
        outside = hop.below * (1 - hop.below / n) * _distance(hop) * hop.carried
        port = hop.gb_s * 1e9 / hop.exchanged if hop.wired else _port(hop, fabric)
        large = max(large, outside / (port * fabric.all_to_all))
        small = max(small, hop.below / n * hop.carried / (port * fabric.exchange_connection))
        peers += (hop.members - 1) * hop.below * fabric.peer_us
    # what goes to another rail where no spine joins them: first inside a node to the rank on that rail
    passed = sum(hop.forwarded * (1 - hop.below / n) for hop in hops)
    large += passed / (_port(hops[0], fabrics[0]) * fabrics[0].all_to_all)
    hop_s = _latency([1.0] * len(hops), hops, fabrics, "ll") + peers * 1e-6
    far_s = _latency([1.0] * len(hops), hops, fabrics, "simple") + peers * 1e-6
    first = fabrics[0]
    return (first.message_start_us * 1e-6 + hop_s, max(small, large)), (first.message_simple_us * 1e-6 + far_s, large)


def _send(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """A message to a neighbour: where all pairs have links of their own, over the one link to it."""
    hop, fabric = hops[-1], fabrics[-1]
    port = hop.gb_s * 1e9 / (hop.members - 1 if hop.topology == "mesh" else hop.ringed)
    large = 1 / (port * fabric.send)
    small = max(large, 1 / (port * fabric.send_connection))
    return (
        ((fabric.message_start_us + hop.latency_us * fabric.step_ll) * 1e-6, small),
        ((fabric.message_simple_us + hop.latency_us * fabric.step_simple) * 1e-6, large),
    )


def _pushed(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """A part of a ring's buffer to the neighbour, by a copy engine that memory starts: its latency alone to begin, and
    as much of the port as the library's rings reach, with no kernel that it launches and hands data to."""
    hop, fabric = hops[-1], fabrics[-1]
    port = hop.gb_s * 1e9 / (hop.members - 1) if hop.topology == "mesh" else _port(hop, fabric)
    return ((hop.latency_us * 1e-6, 1 / (port * max(fabric.reduce_scatter, fabric.all_reduce))),)


def _gather_in_place(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """An all-gather of blocks that already lie where the result is to be: a ring, without a copy of one's own."""
    return tuple(_ring(n, hops, fabrics, "all_gather"))


def _relay(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """A message that each rank waits for and passes on: as many sends one after the other as there are neighbours, most
    of them inside the innermost level."""
    total, below = [(0.0, 0.0), (0.0, 0.0)], 1
    for hop, fabric in zip(hops, fabrics):
        between = (hop.members - 1) * n / (below * hop.members)
        lines = _send(n, (hop,), (fabric,))
        total = [(a + between * start, b + between * rate) for (a, b), (start, rate) in zip(total, lines)]
        below *= hop.members
    return tuple(total)


def _hops(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """Messages from every rank to the next, all at once, as often as there are others: each time the slowest link of
    the ring is waited for."""
    sent = [_send(n, (hop,), (fabric,)) for hop, fabric in zip(hops, fabrics)]
    return tuple(((n - 1) * max(s for s, _ in both), (n - 1) * max(r for _, r in both)) for both in zip(*sent))


def _neighbours(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """Messages between ranks that meet, all at once: each takes the latency of the outermost level that any crosses,
    and the port that most of them pass carries them one after the other."""
    sent = [_send(n, (hop,), (fabric,)) for hop, fabric in zip(hops, fabrics)]
    loads = [hop.messages / uncontended(hop, fabric) for hop, fabric in zip(hops, fabrics)]
    found = []
    for levels in zip(*sent):  # a protocol's line at every level
        rate = max(load * rate for load, (_, rate) in zip(loads, levels))
        found.append((levels[-1][0], rate))
    return tuple(found)


def _broadcast(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    return tuple(_ring(n, hops, fabrics, "broadcast"))


def _star(n: int, hops: tuple[Hop, ...], fabrics: tuple[Constants, ...]) -> tuple[Line, ...]:
    """An all-reduce over one rank: it receives every other's buffer and sends the sum to each, through its own port of
    the outermost level."""
    return tuple((2 * start, 2 * (n - 1) * rate) for start, rate in _send(n, hops, fabrics))


_ALGORITHMS = {
    "star": _star,
    "all_reduce": _all_reduce,
    "all_gather": _gather("all_gather"),
    "reduce_scatter": _gather("reduce_scatter"),
    "all_to_all": _exchange,
    "send": _send,
    "pushed": _pushed,
    "gather_in_place": _gather_in_place,
    "relay": _relay,
    "neighbours": _neighbours,
    "hops": _hops,
    "broadcast": _broadcast,
}
