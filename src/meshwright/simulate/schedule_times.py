"""Schedules that are searched for given times (zero-bubble: Qi et al. 2401.10241, section 3): which times they are
searched for, and which of the orders found is kept.

An order found for the very times of a step can be slower than the one found for slightly longer ones: the search is
greedy. Faster links would then make a slower step. So orders are searched for a few expectations of what exchanges
take, as shares of what a rank computes, and the one whose step is fastest on the cluster is kept. The expectations know
nothing of the links, so that better links choose among the same orders, each of which they can only hurry; this holds
wherever a step is a longest path, that is without shared ports and cores (``clock.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright import schedules
from meshwright.cost import Costs
from meshwright.graph import KIND
from meshwright.lower import Lowered, lower, order
from meshwright.plan import Plan
from meshwright.simulate.clock import times
from meshwright.simulate.price import Priced, Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Expected times of exchanges over that of the mean rank's forward: of a message between stages, and of those inside a
#: forward or a backward. On models and clusters of many kinds, at links from a hundredth to thirty times their speed,
#: the best order of these was within 0.1% of the one searched for the step's own times (`test_schedule_times.py`).
EXPECTED = ((0.0, 0.0), (0.3, 0.0), (0.0, 0.5))


def takes_times(plan: Plan) -> bool:
    """Whether the plan's schedule is searched for the times of its passes."""
    return "t_f" in schedules.get(plan.pipeline.schedule).params and plan.layout.pp > 1


def fastest_order(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Simulated:
    """The step of a legal plan whose schedule takes times, in the order that is fastest of those searched."""
    bucket = costs.framework.defaults.bucket_bytes
    lowered = lower(plan, model, cluster, train)  # under equal times, to price its passes
    computed = measured_times(lowered, Pricer(costs.without_links()).all(lowered.programs))
    pricer = Pricer(costs)
    best = None
    for params in _distinct(plan, lowered, train, computed):
        lowered = lower(plan, model, cluster, train, params, bucket_bytes=bucket)
        priced = pricer.all(lowered.programs)
        found = Simulated.of(lowered, priced, times(lowered, priced, costs), costs, params)
        if best is None or found.step_time_s < best.step_time_s:
            best = found
    return best


def _distinct(plan: Plan, lowered: Lowered, train: Train, computed: dict[str, object]) -> Iterator[dict[str, object]]:
    """Times to search a schedule for, once for each order that comes of them."""
    counts = set(plan.layout.shares or [plan.num_microbatches(train.global_batch)])
    middling, seen = float(np.mean(computed["t_f"])), set()
    for between, inside in EXPECTED:
        more = {name: tuple(float(f"{t + inside * middling:.6g}") for t in computed[name]) for name in ("t_f", "t_b")}
        params = computed | more | {"t_comm": float(f"{between * middling:.6g}")}
        found = tuple(order(plan, count, params).kind.tobytes() for count in sorted(counts))
        if found not in seen:
            seen.add(found)
            yield params


def measured_times(lowered: Lowered, priced: Priced) -> dict[str, object]:
    """``t_f``, ``t_b``, ``t_w`` of every pipeline rank and ``t_comm`` of a message in microseconds, and ``keep_w``, the
    share of a microbatch's activations that stays from B to W."""
    graph, pp = lowered.graph, lowered.stages.plan.layout.pp
    duration = priced.durations[graph.cost_key] * 1e6
    stage = graph.attribute("stage")
    times: dict[str, object] = {}
    for name, kind in (("t_f", "F"), ("t_b", "B"), ("t_w", "W")):
        chosen = graph.kind == KIND[kind]
        total = np.bincount(stage[chosen] % pp, weights=duration[chosen], minlength=pp)
        passes = np.unique(
            np.stack([stage[chosen], graph.attribute("microbatch")[chosen]]).astype(np.int64), axis=1
        ).shape[1]
        times[name] = tuple(float(f"{t:.6g}") for t in total / max(1, passes // pp))
    sends = duration[graph.kind == KIND["send"]]
    times["t_comm"] = float(f"{sends.mean():.6g}") if len(sends) else 0.0
    kept = [lowered.stages.activations(c) for c in dict.fromkeys(lowered.stages.compositions)]
    saved, held = sum(a.saved for a in kept), sum(a.held for a in kept)
    times["keep_w"] = min(1.0, held / saved) if saved else 1.0
    return times
