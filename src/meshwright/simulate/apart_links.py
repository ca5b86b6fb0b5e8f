"""Transfers of caches between engines, over flat arrays: what :class:`meshwright.simulate.kv_links.KvLinks` does, bit
for bit. Each is of one request, by whose number what is known of it is found."""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, part
from meshwright.simulate.apart_steps import NEVER


@part
def settle(
    num_flows: int,
    flows: Int64s,
    flowing: Int64s,
    left: Float64s,
    rate: OutFloat64s,
    way: Int64s,
    out_port: Int64s,
    in_port: Int64s,
    out_share: Float64s,
    in_share: Float64s,
    num_ports: int,
    room: OutFloat64s,
    load: OutFloat64s,
    rising: OutInt64s,
) -> None:
    """Give every transfer its rate: all grow alike until a port is full, then those that do not use it."""
    rises = 0
    for i in range(num_flows):
        r = flows[i]
        rate[r] = 0.0
        if flowing[r] == 1 and left[r] > 0.0:
            rising[rises] = r
            rises += 1
    for port in range(num_ports):
        room[port] = 1.0
    while rises > 0:
        for port in range(num_ports):
            load[port] = 0.0
        for i in range(rises):
            load[out_port[way[rising[i]]]] += out_share[way[rising[i]]]
            load[in_port[way[rising[i]]]] += in_share[way[rising[i]]]
        step = NEVER
        for port in range(num_ports):
            if load[port] > 0.0 and room[port] / load[port] < step:
                step = room[port] / load[port]
        for port in range(num_ports):
            room[port] -= step * load[port]
        still = 0
        for i in range(rises):
            r = rising[i]
            rate[r] += step
            out, into = out_port[way[r]], in_port[way[r]]
            full = load[out] > 0.0 and room[out] <= 1e-12
            if not (full or (load[into] > 0.0 and room[into] <= 1e-12)):
                rising[still] = r
                still += 1
        rises = still


@part
def advance(
    from_s: float,
    to_s: float,
    num_flows: int,
    flows: Int64s,
    flowing: OutInt64s,
    ready_s: Float64s,
    left: OutFloat64s,
    rate: Float64s,
) -> tuple[int, float]:
    """Let time pass, to the next change at most; return whether there is one, and the seconds of work done."""
    changed, worked = 0, 0.0
    for i in range(num_flows):
        r = flows[i]
        if flowing[r] == 0:
            if ready_s[r] <= to_s:
                changed = 1
                flowing[r] = 1
        elif left[r] > 0.0:
            moved = (to_s - from_s) * rate[r]
            if from_s + left[r] / rate[r] <= to_s:
                moved = left[r]
                changed = 1
            elif moved > left[r]:
                moved = left[r]
            left[r] -= moved
            worked += moved
    return changed, worked


@part
def next_change(
    now: float,
    num_flows: int,
    flows: Int64s,
    flowing: Int64s,
    ready_s: Float64s,
    left: Float64s,
    rate: Float64s,
) -> float:
    """Return when the next transfer begins to flow or is over, if no other begins."""
    due = NEVER
    for i in range(num_flows):
        r = flows[i]
        then = ready_s[r]
        if flowing[r] == 1:
            then = now + left[r] / rate[r] if left[r] > 0.0 else now
        due = then if then < due else due
    return due


@part
def part_over(num_flows: int, flows: OutInt64s, flowing: Int64s, left: Float64s, over: OutInt64s) -> tuple[int, int]:
    """Take those of the flows that are over out of them and write them down; return how many are left, and over."""
    kept = num_over = 0
    for i in range(num_flows):
        r = flows[i]
        if flowing[r] == 1 and left[r] <= 0.0:
            over[num_over] = r
            num_over += 1
        else:
            flows[kept] = r
            kept += 1
    return kept, num_over
