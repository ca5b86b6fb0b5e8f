"""The denoising steps of a diffusion model on the virtual clock: one cyclic graph, of which steps are unrolled.

A step is a graph of stretches of kernels and the exchanges between them (``simulate/ports.py``). Where a step waits for
all of its own exchanges, every edge is of the step. Relaxed, what comes from other patches or from the stage before is
of the step before: the same edge with a lag of one step, so that exchanges run beside kernels, and stages at once
(DistriFusion, Li et al. 2402.19481; AsyncDiff, Chen et al. 2406.06911).
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.cost.roofline import contention
from meshwright.graph import GraphBuilder, TaskGraph
from meshwright.lower.denoising import DenoisingStep
from meshwright.lower.program import Program
from meshwright.plan.facets.denoising import PATCHES, STAGES
from meshwright.simulate.engine import steady_state, times
from meshwright.simulate.ports import PassPart, cut
from meshwright.simulate.price import Pricer
from meshwright.simulate.unrolled import unrolled
from meshwright.timeline import Timeline, from_times

#: Steps of a timeline that is drawn: as all of them are alike, two and what begins the next.
DRAWN_STEPS = 3


class DenoisedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of all steps (``total_s``), of a step that waits for its exchanges (``waiting_s``) and of one in the
    steady state (``step_s``); of the latter how long the busiest rank computes. ``sigma`` is the relative error of the
    passes' prices, ``sent_bytes`` what a rank brings into the exchanges inside a step's layers, ``mixed_bytes`` into
    the sum of what experts have found. ``graph`` is that of a step in the steady state, with the seconds of its cost
    keys."""

    total_s: float
    waiting_s: float
    step_s: float
    computed_s: float
    sigma: float
    sent_bytes: float
    graph: TaskGraph
    seconds: np.ndarray
    mixed_bytes: float = 0.0

    @property
    def timeline(self) -> Timeline:
        """The first steps of those in the steady state: :data:`DRAWN_STEPS` of them."""
        drawn = unrolled(self.graph, DRAWN_STEPS)
        return from_times(drawn, *times(drawn, self.seconds))


def denoised(step: DenoisingStep, costs: Costs, *, steps: int, warmup: int, stale: str) -> DenoisedTimes:
    """Time all steps, the first `warmup` of which wait for every exchange."""
    pricer = Pricer(costs)
    first = min(warmup, steps) if stale in (PATCHES, STAGES) else steps
    shown = graph_of(step, costs, pricer, "")
    plain = relaxed = _ends(shown, max(first, 2))
    if first < steps:
        shown = graph_of(step, costs, pricer, stale)
        relaxed = _ends(shown, max(steps - first, 2))
    total = (plain[first - 1] if first else 0.0) + (relaxed[steps - first - 1] if first < steps else 0.0)
    last = relaxed if first < steps else plain
    runs = [step.runs(rank) for rank in range(len(step.passes))]
    priced = [pricer(program) for some in runs for program in some]
    computing_s = sum(one.seconds for one in priced)
    return DenoisedTimes(
        total_s=float(total),
        waiting_s=_period(plain, len(step.passes)),
        step_s=_period(last, len(step.passes)),
        computed_s=max(sum(_computed(costs, program) for program in some) for some in runs),
        sigma=float(np.sqrt(sum(float((one.spread**2).sum()) for one in priced)) / computing_s) if computing_s else 0.0,
        sent_bytes=max(_sent(program) for program in step.passes),
        graph=shown[0],
        seconds=np.array(shown[1]),
        mixed_bytes=step.mixed_bytes,
    )


def _period(ends: np.ndarray, stages: int) -> float:
    """Seconds of a step in the steady state, in the mean of as many steps as a message takes to pass all stages."""
    over = min(stages, len(ends) - 1)
    return float(ends[-1] - ends[-1 - over]) / over


def _ends(priced: tuple[TaskGraph, list[float]], steps: int) -> np.ndarray:
    """The end of each of so many steps of a graph with the seconds of its cost keys, seconds [steps]."""
    return steady_state(priced[0], np.array(priced[1]), steps)


def graph_of(step: DenoisingStep, costs: Costs, pricer: Pricer, stale: str) -> tuple[TaskGraph, list[float]]:
    """Return the graph of a step, and the seconds of each of its cost keys. ``stale`` says which edges reach back to
    the step before: none (""), those from other ranks' ``patches``, or those between ``stages``."""
    builder = GraphBuilder(tuple(f"rank {rank}" for rank in range(len(step.passes))))
    seconds: list[float] = []

    def put(kind: str, rank: int, queue: str, duration: float) -> int:
        seconds.append(duration)
        return builder.add(kind, str(len(seconds) - 1), builder.stream(rank, queue), stage=rank)

    def laid(rank: int, program: Program) -> tuple[list[int], list[int]]:
        """Put a pass, and return the tasks that it begins and ends with."""
        parts = _parts(program, costs, pricer, stale == PATCHES)
        at: list[int] = []
        for part in parts:
            price = part.seconds if part.work is None else costs.price(part.work, program.site.device).seconds
            at.append(put("op", rank, part.queue, price))
        for task, part in zip(at, parts):
            for before in part.after:
                other = parts[before].work is not None and parts[before].queue == "cp"
                late = stale == PATCHES and other and part.work is None
                builder.depend(task, at[before], int(late))
        used = {a for part in parts for a in part.after}
        first = [task for task, part in zip(at, parts) if not part.after]
        return first, [task for place, task in enumerate(at) if place not in used]

    begins, ends = [], []
    for rank in range(len(step.passes)):
        every = [laid(rank, program) for program in step.runs(rank)]
        for (_, before), (after, _) in pairwise(every):
            for task in after:
                for one in before:
                    builder.depend(task, one)
        begins.append(every[0][0])
        ends.append(every[-1][1])
    if step.mixing is not None:
        summed = put("all_reduce", 0, "dp", pricer(step.mixing).seconds)
        for task in ends[0]:
            builder.depend(summed, task)
        for task in begins[0]:
            builder.depend(task, summed, 1)
    late = int(stale == STAGES)
    for rank, message in enumerate(step.onward):
        sent = put("send", rank, "pp_forward", pricer(message).seconds)
        for task in ends[rank]:
            builder.depend(sent, task)
        for task in begins[rank + 1]:
            builder.depend(task, sent, late)
    if step.back is not None:
        last = len(step.passes) - 1
        found = put("send", last, "pp_backward", pricer(step.back).seconds)
        for task in ends[last]:
            builder.depend(found, task)
        for task in begins[0]:
            builder.depend(task, found, 1)
    return builder.build(), seconds


def _parts(program: Program, costs: Costs, pricer: Pricer, beside: bool) -> list[PassPart]:
    """A pass cut at its exchanges, with what it takes beyond them at its end (a host that issues too slowly) and, where
    exchanges run beside kernels, what those lose to them."""
    found = cut(costs, program)
    if len(found) == 1:
        return [PassPart("compute", pricer(program).seconds, None, [])]
    device = program.site.device
    moved = sum(costs.price(part.work, device).seconds for part in found if part.work is not None)
    computed = sum(part.seconds for part in found)
    rest = max(0.0, pricer(program).seconds - moved - computed)
    if beside:
        rest = max(0.0, rest - moved) + min(moved, computed) * contention(device)
    kernels = [place for place, part in enumerate(found) if part.work is None]
    return [*found, PassPart("compute", rest, None, kernels)] if rest > 0 else found


def _computed(costs: Costs, program: Program) -> float:
    """Seconds of a pass's kernels."""
    return sum(part.seconds for part in cut(costs, program))


def _sent(program: Program) -> float:
    """Bytes that a rank sends in the exchanges of a pass between patches."""
    total = 0.0
    for layer in program.layers:
        for entry in layer.entries:
            if entry.queue == "cp":
                work = entry.work
                gathered = work.op == "all_gather"
                total += work.num_bytes * ((work.group.size - 1) / work.group.size if gathered else 1.0)
    return total
