"""Times for schedules that are made for given ones: each rank's passes as priced, for zero-bubble search
(Qi et al. 2401.10241, section 3)."""

from __future__ import annotations

import numpy as np

from meshwright import schedules
from meshwright.graph import KIND
from meshwright.lower import Lowered
from meshwright.plan import Plan
from meshwright.simulate.price import Priced


def takes_times(plan: Plan) -> bool:
    """Whether the plan's schedule is searched for the times of its passes."""
    return "t_f" in schedules.get(plan.pipeline.schedule).params and plan.layout.pp > 1


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
