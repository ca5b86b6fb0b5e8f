"""A fabric as a cluster's own measurements tell it: bus bandwidths of nccl-tests instead of the catalog's knowledge.

Two jobs on the same NICs may differ sevenfold: of 559 of the nanotron sweep over 8 to 64 nodes with EFA, 121 gathered
256 MiB in 12 to 24 us for each of a ring's steps (medians by number of ranks) and reduced over trees, 438 took 78 to 81
us and ran rings alone. Nothing in a description of hardware says which it will be; two lines of nccl-tests do.
"""

from __future__ import annotations

from math import ceil, inf, log2
from statistics import mean

import msgspec

from meshwright.cost.fabric import Constants
from meshwright.work import REACHED_BYTES, Hop, MeasuredBusBandwidth

GATHERS = ("all_gather", "reduce_scatter")
#: A measured all-reduce that trees would have done in less than this share of its time ran none.
TREES_WITHIN = 0.5
#: Of a ring's time that its steps are taken to be at most where they cannot be told from its bytes.
STEPS_AT_MOST = 0.5


def on_this(fabric: Constants, hop: Hop) -> Constants:
    """Return a fabric's constants for a level: with the bandwidths measured over it, and then with the slower steps of
    a ring beside other work."""
    if hop.reached is not None:
        fabric = as_reached(fabric, hop.reached, hop.latency_us)
    if hop.steps == 1.0 or hop.reached is None:
        return fabric  # steps beside other work were told of networks that were measured alone
    gather_us, reduce_us = fabric.gather_us * hop.steps, fabric.reduce_us * hop.steps
    between = fabric.step_simple
    if gather_us and hop.latency_us:
        between = min(between * hop.steps, gather_us / hop.latency_us)
    return msgspec.structs.replace(fabric, gather_us=gather_us, reduce_us=reduce_us, step_simple=between)


def as_reached(fabric: Constants, reached: MeasuredBusBandwidth, latency_us: float) -> Constants:
    """A fabric's constants with what collectives over all of a cluster's devices reached there; `latency_us` is the
    level's.

    An all-gather or reduce-scatter is a ring: what it takes beyond its bytes at the port's rate is what each of its
    steps takes, and no message between neighbours takes longer than such a step. An all-reduce is a ring too if trees
    would have been much quicker than what was measured; else the trees are as fast as measured, and so are the rings.
    An operation that was not measured takes the steps of those that were.
    """
    known = dict(reached.busbw_gb_s)
    port = reached.gb_s * 1e9 * min(1.0, (2 / reached.nodes) ** fabric.contention)
    # A trip around two nodes, as nccl-tests on two nodes show it, for each of its steps: on few nodes the bytes take
    # most of the time that is measured, and what they leave is no better known than this.
    usual = latency_us * fabric.step_simple / (2 * reached.ranks / reached.nodes - 1)
    told: dict[str, float] = {}
    steps = []
    for op in GATHERS:
        if op in known:
            step, told[op] = _ring(known[op], 1, reached.ranks, port, getattr(fabric, op), usual)
            steps.append(step)
    if steps:
        told["gather_us"] = told["reduce_us"] = mean(steps)
        told["step_simple"] = min(fabric.step_simple, told["gather_us"] / latency_us if latency_us else inf)
    if "all_reduce" in known:
        once = latency_us * told.get("step_simple", fabric.step_simple) * 1e-6
        told |= _all_reduce(fabric, known["all_reduce"], reached, port, usual, once)
    return msgspec.structs.replace(fabric, **told)


def seconds_of(busbw_gb_s: float, rounds: int, ranks: int) -> float:
    """Return the seconds of a ring collective of ``REACHED_BYTES`` over `ranks` at a bus bandwidth in GB/s; `rounds` is
    2 for an all-reduce, else 1."""
    return rounds * (ranks - 1) / ranks * REACHED_BYTES / (busbw_gb_s * 1e9)


def _ring(
    busbw_gb_s: float, rounds: int, ranks: int, port: float, share: float, usual_us: float
) -> tuple[float, float]:
    """Microseconds of a ring's step, and the share of a port's bytes a second that its large messages reach: together
    they take as long as was measured."""
    took, steps = seconds_of(busbw_gb_s, rounds, ranks), rounds * (ranks - 1)
    moved = steps / ranks * REACHED_BYTES / port
    step = max((took - moved / share) / steps, min(usual_us * 1e-6, STEPS_AT_MOST * took / steps))
    return step * 1e6, min(1.0, moved / (took - steps * step))


def _all_reduce(
    fabric: Constants, busbw_gb_s: float, reached: MeasuredBusBandwidth, port: float, usual_us: float, once: float
) -> dict[str, float]:
    """Return the constants of an all-reduce that took so long, by trees or by rings, neither faster than measured.

    `once` are the seconds of a tree's step."""
    took = seconds_of(busbw_gb_s, 2, reached.ranks)
    step, share = _ring(busbw_gb_s, 2, reached.ranks, port, fabric.all_reduce, usual_us)
    told = {"reduce_us": step, "all_reduce": share}
    moved = 2 * (reached.nodes - 1) / reached.nodes * REACHED_BYTES / port
    up_and_down = min(2 * ceil(log2(reached.nodes)) * once, STEPS_AT_MOST * took)
    if moved / (fabric.all_reduce * fabric.tree) + up_and_down < TREES_WITHIN * took:
        return told | {"tree_nodes": 1.0}
    return told | {"tree_nodes": 0.0, "tree": min(1.0, moved / (took - up_and_down) / share)}
