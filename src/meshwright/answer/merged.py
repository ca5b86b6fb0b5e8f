"""Times of merged tasks of clients besides a step with one head (``sync/merged.py``, Zhuang et al. 2307.11285)."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cost import Costs
from meshwright.graph import KIND
from meshwright.plan import Plan
from meshwright.plan.facets.sync import Sync
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.record import SyncPolicy

#: Times that the values of a model are read or written to take a step of the trunk, and to come back from it.
MOVES = 12


def of_tasks(
    policy: SyncPolicy, plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs, one: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of a step for each head more than one, and of a measurement without what moves the values, for a client
    of a cluster: the device and the work are those of a `plan` of one replica, of which a step and a pass more with one
    head take `one`.

    A measurement is a pass forward with all heads, and for each task a whole pass with its head alone and one more
    forward with all."""
    merged = policy.merged
    every = msgspec.structs.replace(plan, sync=Sync(policy=policy.text))
    found = simulate(every, model, cluster, train, costs)
    forwards = found.lowered.graph.kind == KIND["F"]
    forward_s = float((found.end_s - found.start_s)[forwards].sum())
    head_s = (found.step_time_s - one[0]) / (merged.tasks - 1)
    return head_s, forward_s + merged.tasks * (one[1] + forward_s)


def head_bytes(policy: SyncPolicy, model: Model, element: int) -> tuple[int, ...]:
    """Bytes of every task's head; the model's own has a bias where it has one."""
    size, bias = model.vocab * model.hidden, model.vocab if model.head.bias else 0
    return tuple((size + (0 if task else bias)) * element for task in range(policy.merged.tasks))


def sizes(
    policy: SyncPolicy, model: Model, element: int, each: list[tuple[float, float]], moved_s: float
) -> dict[str, Any]:
    """Return what :class:`~meshwright.simulate.clients.ClientSizes` says of merged tasks, `each` client's seconds as
    :func:`of_tasks` tells them; values have `element` bytes, and a trial step moves them in `moved_s`."""
    return {
        "merged": policy.merged,
        "head_bytes": head_bytes(policy, model, element),
        "head_s": tuple(head_s for head_s, _ in each),
        "measure_s": tuple(measure_s + policy.merged.tasks * moved_s for _, measure_s in each),
    }
